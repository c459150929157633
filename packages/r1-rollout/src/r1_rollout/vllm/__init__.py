"""vLLM as r1's engine. Nothing here imports vLLM before it is used."""
