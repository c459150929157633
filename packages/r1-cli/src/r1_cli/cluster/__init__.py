"""Ranks and engines as processes under Ray."""
