"""What each command does, from a checked configuration to its end."""
