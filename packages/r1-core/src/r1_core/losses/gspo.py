"""GSPO: the importance ratio of a whole sequence, clipped, in its sequence and its token form; and LUSPO.

With s = exp(mean over the row of log(pi / pi_old)), the geometric mean of the token ratios:
GSPO (arXiv 2507.18071): max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)), the gradient through all of s.
GSPO-token (arXiv 2507.18071): the same with s_t = sg(s)·pi_t / sg(pi_t), whose value is s and whose
gradient reaches token t alone, so that advantages may differ between tokens.
LUSPO (arXiv 2602.05261): GSPO's sequence loss times the sequence's length, which otherwise favours short answers.

All are means over sequences, so `seq` is the aggregation that they are meant for: by tokens a row would weigh by its
length once more. As s moves far less than a token's ratio, the clip widths are small: 3e-4 and 4e-4 in GSPO's paper,
2e-3 and 2.5e-3 in LUSPO's. None of the papers has a dual clip.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    clipped_surrogate,
    masked_advantages,
    masked_logprobs,
    row_mean,
    token_gap,
)
from r1_core.settings import ClipWidth, DualClip, NonNegative
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class GSPO(PolicyLoss):
    """max(−A·s, −A·clip(s)) on every token of the sequence.

    Use it where rewards are for whole answers, and with mixtures of experts, whose token ratios jump as routing
    changes.
    """

    names = ("gspo",)
    aggregation = "seq"

    clip_low: ClipWidth = 3e-4
    clip_high: NonNegative = 4e-4
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics of `clipped_surrogate`, whose ratio is the sequence's."""
        return _by_sequence(inputs, self.clip_low, self.clip_high, self.clip_dual)


@dataclass(frozen=True, slots=True)
class LUSPO(PolicyLoss):
    """L·max(−A·s, −A·clip(s)) on every token of the sequence, L its length.

    Use it in place of `gspo` where that one favours short answers.
    """

    names = ("luspo",)
    aggregation = "seq"

    clip_low: ClipWidth = 2e-3
    clip_high: NonNegative = 2.5e-3
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics of `clipped_surrogate`, whose ratio is the sequence's."""
        losses, metrics = _by_sequence(inputs, self.clip_low, self.clip_high, self.clip_dual)
        return losses * inputs.loss_mask.sum(-1, keepdim=True), metrics


@dataclass(frozen=True, slots=True)
class GSPOToken(PolicyLoss):
    """max(−A·s_t, −A·clip(s_t)), s_t = sg(s)·pi_t / sg(pi_t): the sequence's ratio with the token's gradient.

    Use it in place of `gspo` where advantages differ from token to token, as with `gae`.
    """

    names = ("gspo_token",)
    aggregation = "seq"

    clip_low: ClipWidth = 3e-4
    clip_high: NonNegative = 4e-4
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return losses [B, R] and the metrics of `clipped_surrogate`, whose ratio is the sequence's."""
        logprobs = masked_logprobs(inputs)
        change = _sequence_change(inputs).detach() + (logprobs - logprobs.detach())
        return clipped_surrogate(change, masked_advantages(inputs), self.clip_low, self.clip_high, self.clip_dual)


def _by_sequence(
    inputs: LossInputs, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The sequence's clipped loss on each of its tokens."""
    change = _sequence_change(inputs).expand(inputs.loss_mask.shape)
    return clipped_surrogate(change, masked_advantages(inputs), clip_low, clip_high, clip_dual)


def _sequence_change(inputs: LossInputs) -> Tensor:
    """log s, [B, 1], clamped so that exp stays finite."""
    return row_mean(token_gap(inputs), inputs.loss_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
