"""`r1 view`: curves and samples of runs in a browser."""
