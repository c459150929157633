"""The record of a run: every sample with its tokens and scores, pictures once, and what the run was started with."""
