"""GMPO: the geometric mean of the token ratios, each clipped in log space before the mean."""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.losses.policy import (
    LOG_RATIO_LIMIT,
    PolicyLoss,
    masked_advantages,
    row_mean,
    token_gap,
)
from r1_core.settings import NonNegative
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class GMPO(PolicyLoss):
    """−A·exp(mean over the row of d_t), d_t = the worse of x and clip(x, −clip_low, clip_high), x = log(pi / pi_old).

    arXiv 2507.20673, with clip widths in log space (the paper: 0.4 both ways). The worse one is the smaller where A >
    0, the larger where A < 0. A is the row's mean advantage. Every token of a sequence gets the sequence's loss:
    aggregate with `seq`. `pg_clipfrac_higher` (A > 0) and `pg_clipfrac_lower` (A < 0) count tokens with a ratio outside
    the band.

    Use it where single tokens of extreme ratio destabilize training: a geometric mean dampens them.

    Watch `actor/pg_clipfrac_higher`, `actor/pg_clipfrac_lower` and `actor/ppo_kl`.

    Fails where credit differs from token to token, as with `gae`: it takes the mean advantage of the row. In a long
    answer a single token hardly moves the mean, so an extreme one passes unseen.
    """

    names = ("gmpo", "geo_mean")
    formula = (
        r"-A \exp\Bigl(\frac{1}{L} \sum_t d_t\Bigr), \qquad d_t = "
        r"\begin{cases} \min(x_t, \operatorname{clip}(x_t)) & A > 0 \\ "
        r"\max(x_t, \operatorname{clip}(x_t)) & A < 0 \end{cases}, "
        r"\qquad x_t = \log \rho_t"
    )
    aggregation = "seq"

    clip_low: NonNegative = 0.4  # in log space
    clip_high: NonNegative = 0.4  # in log space

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        gap, mask = token_gap(inputs), inputs.loss_mask
        advantages = masked_advantages(inputs)
        sign = advantages.sign()
        clipped = gap.clamp(-self.clip_low, self.clip_high)
        # Where A is 0 so is the sign, and with it the token's part in the mean.
        worse = sign * torch.minimum(sign * gap, sign * clipped)
        ratio = row_mean(worse, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        losses = torch.where(mask, -row_mean(advantages, mask) * ratio, 0.0)
        outside = gap != clipped
        metrics = {
            "ppo_kl": -gap.detach(),
            "pg_clipfrac_higher": (outside & (advantages > 0)).to(gap.dtype),
            "pg_clipfrac_lower": (outside & (advantages < 0)).to(gap.dtype),
        }
        return losses, metrics
