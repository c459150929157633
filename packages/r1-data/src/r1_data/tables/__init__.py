"""The files of a source: tables of rows by number, by format, slice and name, each row read when it is asked for."""
