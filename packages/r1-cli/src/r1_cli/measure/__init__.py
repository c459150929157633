"""What is reported of a step, and of a model's responses."""
