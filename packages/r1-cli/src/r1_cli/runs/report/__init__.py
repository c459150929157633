"""`r1 report`: one HTML page about a run."""
