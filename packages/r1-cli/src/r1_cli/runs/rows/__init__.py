"""Sampled answers on disk, and the rows that are chosen from them."""
