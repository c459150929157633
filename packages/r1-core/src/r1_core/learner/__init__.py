"""The learner: from samples to micro-batches, log-probs, gradients, optimizer steps and checkpoints."""

from r1_core.learner.learner import Learner

__all__ = ["Learner"]
