"""Files as tables of rows by number; a row is read when it is requested."""
