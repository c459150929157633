"""GiGPO advantages: whole episodes compared within a group, and single turns that started from the same state.

A = A_episode + omega · A_step: the episode among those of its group, the turn among turns that began in the same state.

A_episode = (r − mean) / (std + eps) over the group's episodes; A_step = (G − mean) / (std + eps) over all turns of the
group that started from the turn's state. r is the episode's reward, not discounted; G = Σ_k gamma^k · (reward of the
k-th turn from this one on) is the turn's return. arXiv 2505.10978 ("Group-in-group policy optimization"). Assumes that
episodes of a group meet the same states again, as in a game or a shop. Needs `turns` and `states` [N, R].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from r1_core.advantages.inputs import AdvantageInputs, Estimator
from r1_core.advantages.statistics import group_statistics, scan
from r1_core.settings import NonNegative, Share


@dataclass(frozen=True, slots=True)
class GiGPO(Estimator):
    """`norm_by_std=False` omits both divisions. A state that occurs once in a group gives A_step = 0.

    Use it for episodes of many turns whose states recur, where one advantage for a whole episode says too little.

    Watch `episode/turns/mean`, `reward/groups_without_variance` and `critic/advantages/max`.

    Fails where states never recur, as in free text: A_step is then 0 on every turn and GRPO remains. A state that
    leaves out what matters, such as the rest of the inventory, compares turns that differ.
    """

    names = ("gigpo",)
    formula = (
        r"A_{it} = \frac{r_i - \operatorname{mean}(r)}{\operatorname{std}(r) + \epsilon} "
        r"+ \omega \frac{G_{it} - \operatorname{mean}_{\text{state}}(G)}"
        r"{\operatorname{std}_{\text{state}}(G) + \epsilon}"
        r", \qquad G_{it} = \sum_{k \ge 0} \gamma^k r_{i,t+k}"
    )
    needs = ("groups", "turns", "states")

    omega: NonNegative = 1.0  # weight of single turns
    gamma: Share = 0.95
    norm_by_std: bool = True
    eps: NonNegative = 1e-6

    def __call__(self, inputs: AdvantageInputs) -> Tensor:
        episodes = self._compare(inputs.rewards, inputs.group_ids)
        return inputs.spread(episodes) + self.omega * self._compare_turns(inputs)

    def _compare(self, rewards: Tensor, groups: Tensor) -> Tensor:
        group = group_statistics(rewards, groups)
        return group.standardized(self.eps) if self.norm_by_std else group.distance

    def _compare_turns(self, inputs: AdvantageInputs) -> Tensor:
        """Return A_step on all tokens of each turn, [N, R]."""
        mask, turns, states = inputs.mask, inputs.require("turns", "GiGPO"), inputs.require("states", "GiGPO")
        if not mask.any():
            return torch.zeros_like(inputs.token_rewards)
        returns = scan(inputs.shaped_rewards, mask, 1.0, turns, self.gamma)[mask]
        number = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)[mask]
        _, turn = torch.unique_consecutive(torch.stack([number, turns[mask]]), dim=1, return_inverse=True)
        first = torch.ones_like(turn, dtype=torch.bool)  # the token whose return is that of its turn
        first[1:] = turn[1:] != turn[:-1]
        keys = torch.stack([inputs.group_ids[number], states[mask]])[:, first]
        _, state = torch.unique(keys, dim=1, return_inverse=True)
        steps = self._compare(returns[first], state)
        return torch.zeros_like(inputs.token_rewards).masked_scatter(mask, steps[turn].to(inputs.token_rewards.dtype))
