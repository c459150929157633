"""What outlives a process: checkpoints, and the request to stop."""
