"""The row formats of the field, one a file: a new one is a new file here, found by its name."""
