"""A pool of vLLM servers: starting, asking, renewing and replacing them."""
