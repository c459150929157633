"""Known row formats, one per file; a new file adds one, named after the file."""
