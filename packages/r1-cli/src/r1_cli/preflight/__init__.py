"""Everything that can be known to be wrong before a run begins, as findings with what to do."""
