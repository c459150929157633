"""Configurations and commands of other trainers, as configurations of r1: one module each, and what they share."""
