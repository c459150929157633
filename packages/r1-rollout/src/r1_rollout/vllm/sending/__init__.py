"""How a learner's ranks send weights to vLLM engines in other processes, by vLLM's own weight transfer."""
