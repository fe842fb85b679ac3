"""Stand-in for vLLM: the names and signatures that the plugin relies on, and no more."""

__version__ = "0"
