"""ReMax advantages: each answer against the greedy answer to the same prompt.

A_t = Σ_(s ≥ t) r_s − b, with b the reward of the prompt's greedy answer.

arXiv 2310.10505 (ReMax) equation 5 and algorithm 2. One extra generation per prompt stands in for the critic. Assumes
`baselines` [N], the same number for all samples of a prompt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs
from r1_core.advantages.scan import discounted_sums


@dataclass(frozen=True, slots=True)
class ReMax:
    """No settings. Equal rewards give zero only where the greedy answer earned the same."""

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        """Return float64 advantages [N, R]. Raises ValueError without `baselines`."""
        baselines = inputs.require("baselines", "ReMax").double()
        if baselines.shape != inputs.group_ids.shape:
            raise ValueError(
                f"baselines have shape {list(baselines.shape)}; ReMax wants one per sample, "
                f"{list(inputs.group_ids.shape)}"
            )
        returns = discounted_sums(inputs.shaped_rewards, inputs.mask, 1.0)
        return torch.where(inputs.mask, returns - baselines[:, None], 0.0)
