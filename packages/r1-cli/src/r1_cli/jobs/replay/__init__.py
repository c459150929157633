"""`r1 replay`: repeat a recorded step and compare it bit by bit."""
