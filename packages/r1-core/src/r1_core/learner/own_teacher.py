"""The policy as its own teacher (self-distillation): its weights as they are, as they were, or their running mean."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from r1_core.losses.policy import check_not_negative


class OwnTeacher:
    """The trained weights that a policy has when it teaches itself, of an adapter its factors.

    Half-precision weights are averaged in float32.

    Args:
        every: optimizer steps after which the policy's weights are taken; 0: those at the start stay.
        rate: instead of `every`, the part of the policy in the running mean after each optimizer step.
    """

    def __init__(self, model: nn.Module, *, every: int = 1, rate: float = 0.0) -> None:
        check_not_negative(every=every, rate=rate)
        if rate > 1:
            raise ValueError(f"rate is {rate}; a running mean takes at most 1 of the policy")
        self.model, self._every, self._rate = model, every, rate
        # Without copies it has the policy's own weights at any time.
        self.weights = {} if every == 1 and not rate else self._copies()

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, one.detach()) for name, one in self.model.named_parameters() if one.requires_grad)

    def _copies(self) -> dict[str, Tensor]:
        return {
            name: one.to(torch.promote_types(one.dtype, torch.float32) if self._rate else one.dtype, copy=True)
            for name, one in self._trained()
        }

    def restart(self) -> None:
        """Take the policy's weights as those of the start."""
        if self.weights:
            self.weights = self._copies()

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Take part in what the policy has learned by optimizer step `step`, counted from 1."""
        if not self.weights or not (self._rate or (self._every and step % self._every == 0)):
            return
        for name, one in self._trained():
            if self._rate:
                self.weights[name].lerp_(one.to(self.weights[name].dtype), self._rate)
            else:
                self.weights[name].copy_(one)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Give the model the teacher's weights for a while; afterwards its own again, bit for bit."""
        kept = self._exchange(self.weights)
        try:
            yield
        finally:
            self._exchange(kept)

    @torch.no_grad()
    def _exchange(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put weights into the model; return those that it had."""
        had = {}
        for name, one in self._trained() if weights else ():
            had[name] = one.clone()
            one.copy_(weights[name])
        return had
