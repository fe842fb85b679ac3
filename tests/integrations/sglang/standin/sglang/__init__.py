"""Stands for SGLang: the names and signatures that the plugin meets."""
