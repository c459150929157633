"""vLLM in this process or on servers, through the public API of the pinned release; imported only when it is used."""
