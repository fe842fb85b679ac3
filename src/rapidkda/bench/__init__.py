"""Measurements: rapidkda and its peers side by side, in one run on one machine, written to one result file."""
