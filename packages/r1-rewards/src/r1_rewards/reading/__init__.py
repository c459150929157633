"""Parse responses, final answers and ground truths."""
