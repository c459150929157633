"""A reward model in the place of the policy: the same methods, with values where a policy has log-probs."""

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from r1_core.learner.batching import MicroLimit
from r1_core.learner.critic import Critic
from r1_core.learner.logprobs import compute_eagerly
from r1_core.learner.parallel import reshard
from r1_core.learner.profiling import PassProfile
from r1_core.learner.trainable import TrainingOptions
from r1_core.losses.value import WeightedValue
from r1_core.needs import Needs
from r1_core.types import Sample


class RewardLearner(Critic):
    """A critic that `reward_model.weigh_values` trains, with the methods that fine-tuning calls on a `Learner`.

    Objectives are not read: the loss is −returns · values.
    """

    name = "reward model"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: Callable[[int], float],
        **options: Unpack[TrainingOptions],
    ) -> None:
        loss, average = WeightedValue(), "seq-mean-token-sum"
        super().__init__(model, optimizer, learning_rate, loss=loss, aggregation=average, **options)

    def add_logprobs(self, samples: Sequence[Sample], needs: Needs = ("values",)) -> list[Sample]:
        """Return the samples with `values`; a reward model has no log-probs."""
        return self.add_values(samples)

    def compute_logprobs_together(self, samples: Sequence[Sample], *, padding_free: bool) -> list[list[float]]:
        """Return the values of trained tokens, all samples in one micro-batch; see `_compute_together`."""
        return self._compute_together(samples, self._values_of, padding_free=padding_free)

    def compute_eager_logprobs(self, samples: Sequence[Sample], noise: torch.dtype | None = None) -> list[list[float]]:
        """Return the values of trained tokens; see `logprobs.compute_eagerly`."""
        self._offloads.load(self.model)
        self.model.eval()
        found = compute_eagerly(self.model, samples, lambda outputs, targets: outputs[:, 0].float(), noise)
        reshard(self.model)
        return found

    def forward_backward(self, samples: Sequence[Sample], objective: object = None) -> dict[str, float]:
        return super().forward_backward(samples)

    def forward_backward_on_policy(
        self, samples: Sequence[Sample], objective: object = None
    ) -> tuple[list[Sample], dict[str, float]]:
        """Accumulate the gradient; the samples have `values` and `returns` already."""
        return list(samples), super().forward_backward(samples)

    def profile_pass(  # type: ignore[override]
        self, samples: Sequence[Sample], objective: object, limit: MicroLimit
    ) -> PassProfile:
        """As `Learner.profile_pass`."""
        return super().profile_pass(samples, limit, gradient=objective is not None)
