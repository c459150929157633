"""Build the rewards of a run: built-in and user verifiers, and rewards that read log-probs of a model."""
