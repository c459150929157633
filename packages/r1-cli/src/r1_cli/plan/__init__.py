"""Before a run: memory, disk, dry run, `r1 estimate`, `r1 check`, `r1 data check`."""
