"""The training loop and everything that one step does."""
