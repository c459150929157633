"""From a configuration to the objects of a run."""
