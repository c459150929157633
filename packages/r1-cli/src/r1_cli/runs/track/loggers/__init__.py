"""Logging services, one module each, found by its name: `trainer.logger=NAME` opens `NAME.py`."""
