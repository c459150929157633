"""`r1 diff`: the differences between two runs."""
