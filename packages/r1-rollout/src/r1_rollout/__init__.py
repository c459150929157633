"""Group sampling with token log-probs and hot weight updates."""
