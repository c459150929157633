"""PPO's clipped policy loss, with two clip widths and dual clip."""

from dataclasses import dataclass

from torch import Tensor

from r1_core.losses.policy import PolicyLoss, clipped_surrogate, log_ratio, masked_advantages
from r1_core.settings import ClipWidth, DualClip, NonNegative
from r1_core.types import LossInputs


@dataclass(frozen=True, slots=True)
class PPOClip(PolicyLoss):
    """max(−A·ratio, −A·clip(ratio, 1 − clip_low, 1 + clip_high)), and at most −A·clip_dual where A < 0.

    arXiv 1707.06347 (clip); arXiv 2503.14476 (a wider upper clip lets unlikely tokens grow); arXiv 1912.09729 (dual
    clip: bounds the loss of a bad token whose ratio exploded; infinity turns it off).

    Use it first. Before the first optimizer step of a step every ratio is 1, so the clip acts from the second one on.

    Watch `actor/pg_clipfrac_higher`, `actor/ppo_kl` and `actor/entropy_loss`.

    Fails where entropy falls early: with equal widths an unlikely token may hardly grow (arXiv 2503.14476), so widen
    `clip_high`. It clips nothing with one optimizer step a step, whatever the widths; then a rate that is too high has
    no other brake than the gradient's norm.
    """

    names = ("default",)
    formula = (
        r"\max\bigl(-A_t \rho_t, -A_t \operatorname{clip}(\rho_t, 1 - c_{\text{low}}, 1 + c_{\text{high}})\bigr), "
        r"\qquad \le -A_t c_{\text{dual}} \text{ where } A_t < 0"
    )
    token_wise = True

    clip_low: ClipWidth = 0.2
    clip_high: NonNegative = 0.3
    clip_dual: DualClip = 3.0  # infinity: none

    def __call__(self, inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
        return clipped_surrogate(
            log_ratio(inputs), masked_advantages(inputs), self.clip_low, self.clip_high, self.clip_dual
        )
