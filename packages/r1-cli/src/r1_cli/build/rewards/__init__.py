"""Reference log-probs for rewards: a frozen model, the policy, or a server."""
