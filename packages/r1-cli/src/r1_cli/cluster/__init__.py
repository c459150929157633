"""One run on many devices: ranks of the learner and engines as actors under Ray, placed, asked and ended together."""
