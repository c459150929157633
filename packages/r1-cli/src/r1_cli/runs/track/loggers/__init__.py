"""Services that a run reports to, one module each, found by its name: `trainer.logger=NAME` asks for `NAME.py`."""
