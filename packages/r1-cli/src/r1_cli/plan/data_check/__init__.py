"""`r1 data check`: read every row of a run and report those it cannot use."""
