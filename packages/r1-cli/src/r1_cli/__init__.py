"""r1 train, r1 merge, r1 eval: one run, from a config to a checkpoint."""
