"""What a run's files say of how it went: its numbers, and what is known to go wrong."""
