"""`r1 convert`: translate commands and configurations of other trainers."""
