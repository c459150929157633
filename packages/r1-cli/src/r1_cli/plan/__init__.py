"""A run's arithmetic and how it is shown, before anything is loaded."""
