"""In place of EasyR1's package, for one command only."""
