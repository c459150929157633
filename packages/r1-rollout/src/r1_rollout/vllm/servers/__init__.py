"""A pool of vLLM servers: start, sampling, weight sync, recovery."""
