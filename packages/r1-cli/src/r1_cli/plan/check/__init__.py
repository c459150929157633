"""`r1 check`: check configuration, data, rewards, model and machine before a run."""
