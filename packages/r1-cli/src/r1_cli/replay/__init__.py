"""A step of an old run once more: from its checkpoint, compared to the bit, stage by stage."""
