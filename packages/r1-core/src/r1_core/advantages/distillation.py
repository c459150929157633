"""Distillation on policy as an advantage: how much more likely a teacher finds each sampled token than the policy."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.losses.policy import check_not_negative
from r1_core.types import Sample, known, tokens, with_tokens


@dataclass(frozen=True, slots=True)
class Distillation:
    """A_t = task advantage + coef · clip(log ν(y_t) − log π_old(y_t)), with ν the teacher.

    Its policy gradient estimates that of the reverse KL of each token, given the tokens before it (arXiv 2306.08543,
    arXiv 2306.13649), from the teacher's log-probs of sampled tokens only.
    """

    coef: float = 1.0
    clip: float = 10.0  # nats, on both sides
    task_reward: bool = False  # keep the task's advantage; otherwise the teacher's replaces it

    def __post_init__(self) -> None:
        check_not_negative(coef=self.coef)
        if not self.clip > 0:
            raise ValueError(f"clip is {self.clip}; it must be above 0 nats")

    def add(self, samples: Sequence[Sample], taught: Sequence[bool]) -> list[Sample]:
        """Return the samples with the teacher's term in their advantages.

        Tokens whose `teacher_logprobs` are NaN have no such term. Raises ValueError if a sample lacks `old_logprobs`,
        `teacher_logprobs` or `advantages`.

        Args:
            taught: whether a sample has a teacher; others keep the task's advantage.
        """
        signal, _ = self._signal(samples)
        counts = torch.tensor([sample.response_length for sample in samples])
        keeps = torch.tensor([self.task_reward or not one for one in taught]).repeat_interleave(counts)
        task = torch.where(keeps, tokens(samples, "advantages"), 0.0)
        return with_tokens(samples, advantages=(task + self.coef * signal).float())

    def _signal(self, samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
        """Return the clipped difference of log-probs, 0 without a teacher, and the raw one, NaN without; both [T]."""
        raw = (tokens(samples, "teacher_logprobs") - tokens(samples, "old_logprobs")).double()
        return torch.where(raw.isnan(), 0.0, raw.clamp(-self.clip, self.clip)), raw

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Return `distillation/…` over trained tokens; {} without log-probs of both models.

        `kl`: the policy's mean KL from the teacher by k1, clipped, in nats. `clipped`: the share beyond the clip of the
        tokens that have a teacher's log-prob. `without_teacher`: the share of all tokens that have none.
        """
        if not samples or not (known(samples, "teacher_logprobs") and known(samples, "old_logprobs")):
            return {}
        signal, raw = self._signal(samples)
        taught = ~raw.isnan()
        count = max(int(taught.sum()), 1)
        return {
            "distillation/kl": (0.0 - float(signal.sum())) / count,
            "distillation/clipped": float((raw[taught].abs() > self.clip).sum()) / count,
            "distillation/without_teacher": missing_share(samples),
        }


@dataclass(frozen=True, slots=True)
class NoTask(Estimator):
    """Advantages of 0, where a teacher's term replaces the task's."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        return torch.zeros_like(inputs.token_rewards)


def missing_share(samples: Sequence[Sample]) -> float:
    """Return the share of trained tokens that have no teacher's log-prob."""
    missing = tokens(samples, "teacher_logprobs").isnan()
    return float(missing.sum()) / max(len(missing), 1)


def without_teacher(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with NaN for the teacher's log-probs."""
    return [replace(one, teacher_logprobs=torch.full(one.loss_mask.shape, torch.nan)) for one in samples]
