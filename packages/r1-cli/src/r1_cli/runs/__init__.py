"""The folder of a run: written while it trains, read by `r1 diagnose`, `diff`, `report` and `view`."""
