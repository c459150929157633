"""The commands of `r1`: parse options and call one function."""
