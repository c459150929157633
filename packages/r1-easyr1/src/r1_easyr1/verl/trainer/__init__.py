"""Holds the module that EasyR1's scripts start."""
