"""`r1 check`: check configuration, machine, model, data and rewards before a run."""
