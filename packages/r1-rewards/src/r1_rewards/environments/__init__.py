"""Tools and environments of multi-turn episodes, in worker processes that can be killed."""
