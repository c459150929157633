"""`r1 diagnose`: find out why a run does not learn."""
