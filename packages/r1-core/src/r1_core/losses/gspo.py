"""GSPO: the importance ratio of a whole sequence, clipped, in its sequence and its token form; and LUSPO.

With s = exp(mean over the row of log(pi / pi_old)), the geometric mean of the token ratios:
GSPO (arXiv 2507.18071): max(−A·s, −A·clip(s, 1 − clip_low, 1 + clip_high)), the gradient through all of s.
GSPO-token (arXiv 2507.18071): the same with s_t = sg(s)·pi_t / sg(pi_t), whose value is s and whose
gradient reaches token t alone, so that advantages may differ between tokens.
LUSPO (arXiv 2602.05261): GSPO's sequence loss times the sequence's length, which otherwise favours short answers.

All are means over sequences: aggregate with `seq`, because a mean over tokens would weigh a row by its length again.
s varies far less than a token's ratio, so the clip widths are small: 3e-4 and 4e-4 in GSPO's paper, 2e-3 and 2.5e-3 in
LUSPO's. None of the papers has a dual clip.
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

    Use it where rewards are for whole answers, and with mixtures of experts, whose token ratios jump when routing
    changes.

    Watch `actor/pg_clipfrac_higher`, `actor/ppo_kl` and `response_length/mean`.

    Fails with short answers at its paper's widths, whose mean log-ratio is large: in the quickstart up to 67 % of a
    step's tokens were clipped and learning was slower, while 0.03 to 0.04 learned as `default` does.
    """

    names = ("gspo",)
    formula = (
        r"\max\bigl(-A s, -A \operatorname{clip}(s, 1 - c_{\text{low}}, 1 + c_{\text{high}})\bigr), \qquad "
        r"s = \exp\Bigl(\frac{1}{L} \sum_t \log \rho_t\Bigr)"
    )
    aggregation = "seq"

    clip_low: ClipWidth = 3e-4
    clip_high: NonNegative = 4e-4
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return _by_sequence(inputs, self.clip_low, self.clip_high, self.clip_dual)


@dataclass(frozen=True, slots=True)
class LUSPO(PolicyLoss):
    """L·max(−A·s, −A·clip(s)) on every token of the sequence, L its length.

    Use it instead of `gspo` where that favours short answers.

    Watch `actor/pg_clipfrac_higher`, `response_length/mean` and `actor/grad_norm`.

    Fails with short answers at its default widths, as `gspo` does. A sequence's loss grows with its length, so the
    longest answers of a batch set the gradient's scale.
    """

    names = ("luspo",)
    formula = (
        r"L \max\bigl(-A s, -A \operatorname{clip}(s, 1 - c_{\text{low}}, 1 + c_{\text{high}})\bigr), \qquad "
        r"s = \exp\Bigl(\frac{1}{L} \sum_t \log \rho_t\Bigr)"
    )
    aggregation = "seq"

    clip_low: ClipWidth = 2e-3
    clip_high: NonNegative = 2.5e-3
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        losses, metrics = _by_sequence(inputs, self.clip_low, self.clip_high, self.clip_dual)
        return losses * inputs.loss_mask.sum(-1, keepdim=True), metrics


@dataclass(frozen=True, slots=True)
class GSPOToken(PolicyLoss):
    """max(−A·s_t, −A·clip(s_t)), s_t = sg(s)·pi_t / sg(pi_t): the sequence's ratio with the token's gradient.

    Use it instead of `gspo` where advantages differ between tokens, as with `gae`.

    Watch `actor/pg_clipfrac_higher` and `actor/ppo_kl`.

    Fails as `gspo` does with short answers at its paper's widths. Where all tokens of an answer have one advantage it
    equals `gspo` (arXiv 2507.18071).
    """

    names = ("gspo_token",)
    formula = (
        r"\max\bigl(-A_t s_t, -A_t \operatorname{clip}(s_t, 1 - c_{\text{low}}, 1 + c_{\text{high}})\bigr), \qquad "
        r"s_t = \operatorname{sg}(s) \frac{\pi_t}{\operatorname{sg}(\pi_t)}"
    )
    aggregation = "seq"

    clip_low: ClipWidth = 3e-4
    clip_high: NonNegative = 4e-4
    clip_dual: DualClip = math.inf

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs = masked_logprobs(inputs)
        change = _sequence_change(inputs).detach() + (logprobs - logprobs.detach())
        return clipped_surrogate(change, masked_advantages(inputs), self.clip_low, self.clip_high, self.clip_dual)


def _by_sequence(
    inputs: LossInputs, clip_low: float, clip_high: float, clip_dual: float
) -> tuple[Tensor, dict[str, Tensor]]:
    change = _sequence_change(inputs).expand(inputs.loss_mask.shape)
    return clipped_surrogate(change, masked_advantages(inputs), clip_low, clip_high, clip_dual)


def _sequence_change(inputs: LossInputs) -> Tensor:
    """Return log s [B, 1], clamped so that exp stays finite."""
    return row_mean(token_gap(inputs), inputs.loss_mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
