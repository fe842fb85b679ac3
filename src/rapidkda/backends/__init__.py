"""Backends. Each is a folder (or one file) that implements `rapidkda.backends.base.Backend`; none is imported here."""
