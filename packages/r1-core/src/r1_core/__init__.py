"""Advantages, losses and the learner for reinforcement learning of language models."""
