"""Thin adapters to the libraries and engines that users of KDA models already run; importing this loads none."""
