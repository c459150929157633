"""vLLM, inside the process or on servers, through the public API of the release that the extras pin.

Nothing here is imported, nor vLLM, before an engine is asked for.
"""
