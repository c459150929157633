"""Sampled groups as data: filtered, shaped, kept over, and turned into samples."""
