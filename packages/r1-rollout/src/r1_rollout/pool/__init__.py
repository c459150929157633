"""A pool of engines: load balancing over members that are actors, subprocesses or HTTP servers."""
