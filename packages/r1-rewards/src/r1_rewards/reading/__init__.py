"""What a response says: final answers, notation, numbers and units, expressions, and what is too costly to read."""
