"""Files as tables of rows by number; a row is read when it is requested.

Text files are not read by `datasets`, which would turn a csv's "007" into 7, give up a whole file for one broken line
without its number, renumber rows after blank lines, and copy each file to a cache.
"""
