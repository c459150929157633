"""Load Hugging Face models: attention, adapters, quantization, sharding."""
