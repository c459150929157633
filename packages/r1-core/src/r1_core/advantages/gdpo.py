"""GDPO advantages: each part of the reward is normalized within its group before the parts are added.

A = (S − mean S) / (std S + eps) over the batch, with S = Σ_k w_k · (r_k − group's mean) / (group's std + eps).

arXiv 2601.05242 ("Group reward-decoupled normalization policy optimization"): if parts are added first, different
combinations of parts of different scales get the same advantage. Needs `parts` [N, K], the K rewards of each answer;
the batch's mean and std are over answers. Put the KL in the loss: token penalties belong to no part.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics
from r1_core.settings import NonNegative


@dataclass(frozen=True, slots=True)
class GDPO(Estimator):
    """Equal parts and groups of one add exactly 0. A part that no answer has is replaced by the reward.

    Raises ValueError without `parts`, with another number of weights than parts, or with token penalties.

    Use it where the reward has several parts of different scales, such as accuracy and format.

    Watch each `reward/PART`, and `critic/advantages/max`.

    Fails where a part is noise: normalized, it weighs as much as accuracy, however small its scale was. Weigh it down
    (`gdpo_reward_weights`), or leave it out (`gdpo_reward_keys`). With a single part it is GRPO, normalized twice.
    """

    names = ("gdpo",)
    formula = (
        r"A_i = \frac{S_i - \operatorname{mean}_{\text{batch}}(S)}{\operatorname{std}_{\text{batch}}(S) + \epsilon}, "
        r"\qquad S_i = \sum_k w_k \frac{r_{ik} - \operatorname{mean}(r_k)}{\operatorname{std}(r_k) + \epsilon}"
    )
    needs = ("groups", "parts")

    reward_keys: tuple[str, ...] | None = None  # parts of the scores; null: all
    reward_weights: tuple[float, ...] | None = None  # w_k of each of them; null: 1 each
    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        parts = self._chosen(inputs)
        weights = self.reward_weights if self.reward_weights is not None else (1.0,) * len(parts)
        if len(weights) != len(parts):
            raise ValueError(f"reward_weights has {len(weights)} numbers, but the answers have {len(parts)} parts")
        if inputs.token_penalties is not None:
            raise ValueError("GDPO judges the parts of rewards and has no place for penalties; put the KL in the loss")
        total = torch.zeros(inputs.group_ids.shape, dtype=torch.float64, device=inputs.group_ids.device)
        for weight, part in zip(weights, parts, strict=True):
            total = total + weight * group_statistics(part, inputs.group_ids).standardized(self.eps)
        batch = group_statistics(total, torch.zeros_like(inputs.group_ids))
        return inputs.spread(batch.standardized(self.eps))

    def _chosen(self, inputs: AdvantageInputs) -> list[Tensor]:
        columns = list(inputs.require("parts", "GDPO").double().unbind(-1))
        if self.reward_keys is None:
            return columns
        if inputs.part_names is None:
            raise ValueError(f"reward_keys is {self.reward_keys} but the advantage inputs have no `part_names`")
        named = dict(zip(inputs.part_names, columns, strict=True))
        return [named.get(key, inputs.scores) for key in self.reward_keys]
