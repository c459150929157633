"""The built-in verifiers: each a module with `score(response, ground_truth) -> Score`."""
