"""The sides of `end_to_end.py`: the task that all have, and a trainer of each, in a process of its own."""
