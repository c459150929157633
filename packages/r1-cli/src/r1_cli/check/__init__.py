"""`r1 data`: every row of a run looked at before the run, without a model: findings, tables, a page, single rows."""
