"""The record of a run: every sample with tokens and scores, its media, and how the run was started."""
