"""Sample and score the groups of a step."""
