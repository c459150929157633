"""From prompts to a step's scored groups."""
