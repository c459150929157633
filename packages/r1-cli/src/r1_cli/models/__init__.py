"""Hugging Face models: their files, their loading, and how they attend."""
