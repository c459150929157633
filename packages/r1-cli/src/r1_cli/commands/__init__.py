"""The commands of `r1`, one per file: arguments in, one call out."""
