"""Built-in tools, one per module, named as the module."""
