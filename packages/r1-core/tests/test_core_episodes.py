"""Episodes of several turns: rewards of turns, discounts, states, and episodes of several samples that count once."""

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from r1_core.advantages import ESTIMATORS, GAE, GRPO, GiGPO, Reinforce, ReinforcePlusPlus, assign
from r1_core.own import as_estimator
from r1_core.types import Sample, tokens, trained, with_tokens

HASH = 2**62  # as far from 0 as float64 cannot tell neighbours apart


@dataclass(frozen=True)
class Turn:
    state: int
    tokens: int
    reward: float


@dataclass(frozen=True)
class Episode:
    group: int
    outcome: float
    turns: tuple[Turn, ...]
    forks: tuple[int, ...] = ()  # the turns with which a further sample begins

    def samples(self, number: int) -> list[Sample]:
        edges = [0, *self.forks, len(self.turns)]
        return [self._sample(number, first, last) for first, last in pairwise(edges)]

    def _sample(self, number: int, first: int, last: int) -> Sample:
        """Two tokens of the prompt, then the turns; behind each, three tokens of the environment."""
        trained, rewards, turns, states = [False] * 2, [0.0] * 2, [-1] * 2, [0] * 2
        for turn, one in [*enumerate(self.turns)][first:last]:
            trained += [True] * one.tokens + [False] * 3
            rewards += [0.0] * (one.tokens - 1) + [one.reward] + [0.0] * 3
            turns += [turn] * one.tokens + [-1] * 3
            states += [HASH + one.state] * one.tokens + [0] * 3
        length = len(trained)
        return Sample(
            torch.arange(length), torch.tensor(trained), torch.arange(length)[None], self.group, self.outcome,
            token_rewards=torch.tensor(rewards), turn_ids=torch.tensor(turns, dtype=torch.int32),
            state_ids=torch.tensor(states), episode_id=number,
        )  # fmt: skip


def draw_episodes(seed: int) -> list[Episode]:
    draw = random.Random(seed)

    def turn() -> Turn:
        return Turn(draw.randrange(3), draw.randint(1, 4), draw.choice([0.0, 0.5, -0.25]))

    return [
        Episode(group, draw.choice([0.0, 1.0]), tuple(turn() for _ in range(draw.randint(1, 5))))
        for group in (4, 4, -7, -7, 4, -7)
    ]


def to_samples(episodes: list[Episode]) -> list[Sample]:
    return [sample for number, episode in enumerate(episodes) for sample in episode.samples(number)]


def advantages(samples: list[Sample]) -> list[list[float]]:
    """The advantages of each sample's trained tokens."""
    assert all(sample.advantages is not None for sample in samples)
    return [sample.advantages[sample.loss_mask].tolist() for sample in samples]


# --- GiGPO against its formula ----------------------------------------------------------------------------------------


def compared(value: float, others: list[float], norm_by_std: bool) -> float:
    mean = math.fsum(others) / len(others)
    if max(others) == min(others):
        return 0.0
    std = math.sqrt(math.fsum((other - mean) ** 2 for other in others) / (len(others) - 1))
    return (value - mean) / (std + 1e-6) if norm_by_std else value - mean


def gigpo_by_hand(episodes: list[Episode], omega: float, gamma: float, norm_by_std: bool) -> list[list[float]]:
    totals = [(one.group, one.outcome + math.fsum(turn.reward for turn in one.turns)) for one in episodes]
    steps: list[list[tuple[int, int, float]]] = []  # group, state, discounted return of each turn of an episode
    for one in episodes:
        rewards = [turn.reward for turn in one.turns]
        rewards[-1] += one.outcome
        returns = [
            math.fsum(gamma ** (later - now) * rewards[later] for later in range(now, len(rewards)))
            for now in range(len(rewards))
        ]
        steps.append([(one.group, turn.state, value) for turn, value in zip(one.turns, returns, strict=True)])
    every = [step for own in steps for step in own]
    found = []
    for one, (group, total), own in zip(episodes, totals, steps, strict=True):
        whole = compared(total, [other for other_group, other in totals if other_group == group], norm_by_std)
        found.append([])
        for turn, (_, state, value) in zip(one.turns, own, strict=True):
            alike = [other for *key, other in every if key == [group, state]]
            found[-1] += [whole + omega * compared(value, alike, norm_by_std)] * turn.tokens
    return found


@pytest.mark.parametrize("settings", [(1.0, 0.95, True), (0.3, 0.5, False), (2.0, 1.0, True), (1.0, 0.0, False)])
@pytest.mark.parametrize("seed", range(6))
def test_gigpo_equals_its_formula(seed: int, settings: tuple[float, float, bool]) -> None:
    episodes = draw_episodes(seed)
    found = advantages(assign(to_samples(episodes), GiGPO(*settings)))
    for own, expected in zip(found, gigpo_by_hand(episodes, *settings), strict=True):
        assert own == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_turn_whose_state_is_unique_has_the_advantage_of_its_episode() -> None:
    one = Episode(0, 1.0, (Turn(1, 2, 0.0), Turn(5, 1, 0.5)))
    other = Episode(0, 0.0, (Turn(1, 1, 0.0), Turn(6, 2, 0.0)))
    first, second, third = advantages(assign(to_samples([one, other]), GiGPO(norm_by_std=False, gamma=0.5)))[0]
    assert first == second == pytest.approx(0.75 + 0.5 * (0.5 * 1.5))
    assert third == pytest.approx(0.75)


def test_gigpo_of_single_answers_is_grpo_twice() -> None:
    samples = [replace(one, turn_ids=None, state_ids=None) for one in to_samples(draw_episodes(1))]
    twice = [[2 * value for value in own] for own in advantages(assign(samples, GRPO()))]
    for own, expected in zip(advantages(assign(samples, GiGPO(gamma=0.5))), twice, strict=True):
        assert own == pytest.approx(expected, rel=1e-6)


def test_turns_without_states_are_refused() -> None:
    samples = [replace(one, state_ids=None) for one in to_samples(draw_episodes(1))]
    with pytest.raises(ValueError, match=r"sample 0 \(group 4\) has no state_ids, which is needed of all samples"):
        assign(samples, GiGPO())


def test_estimators_of_a_user_get_turns_and_states_as_they_are() -> None:
    seen = []

    def spy(inputs):
        seen.append(inputs)
        return inputs.spread(inputs.rewards)

    spy.needs = ("turns", "states")
    episode = Episode(3, 1.0, (Turn(1, 2, 0.0), Turn(2, 1, 0.5)))
    assign(to_samples([episode]), as_estimator(spy))
    assert seen[0].turns.tolist() == [[0, 0, 1]]
    assert seen[0].states.tolist() == [[HASH + 1, HASH + 1, HASH + 2]]
    assert seen[0].token_rewards.tolist() == [[0.0, 0.0, 1.5]]
    assign([replace(to_samples([episode])[0], turn_ids=None, state_ids=None)], as_estimator(spy))
    assert seen[1].turns.tolist() == [[0, 0, 0]]
    assert seen[1].states.tolist() == [[3, 3, 3]]


# --- rewards of turns -------------------------------------------------------------------------------------------------


def test_rewards_of_turns_are_discounted_by_token_or_by_turn() -> None:
    samples = to_samples([Episode(0, 4.0, (Turn(0, 2, 1.0), Turn(0, 2, 2.0)))])
    plain = {"norm_by_std": False}
    for per, returns in (("token", [1.25, 2.5, 3.0, 6.0]), ("turn", [4.0, 4.0, 6.0, 6.0])):
        expected = [value - sum(returns) / 4 for value in returns]
        [found] = advantages(assign(samples, ReinforcePlusPlus(0.5, gamma_per=per, **plain)))
        assert found == pytest.approx(expected)
        still = [replace(one, values=torch.zeros(len(one.token_ids))) for one in samples]
        [found] = advantages(assign(still, GAE(0.5, gamma_per=per, **plain)))
        assert found == pytest.approx(expected)


def test_without_turns_nothing_is_discounted_by_turn() -> None:
    samples = [replace(one, turn_ids=None) for one in to_samples(draw_episodes(2))]
    assert advantages(assign(samples, ReinforcePlusPlus(0.5, gamma_per="turn"))) == advantages(
        assign(samples, ReinforcePlusPlus(1.0))
    )


def test_a_reward_on_a_token_of_the_environment_is_refused() -> None:
    [one] = to_samples([Episode(5, 1.0, (Turn(0, 2, 0.0),))])
    wrong = replace(one, token_rewards=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.0]))
    with pytest.raises(ValueError, match=r"sample 0 \(group 5\) has reward 0.5 on token 4, which the policy did not"):
        assign([wrong], GRPO())
    with pytest.raises(ValueError, match=r"sample 0 \(group 5\) has reward nan"):
        assign([replace(one, token_rewards=torch.full((7,), math.nan) * one.loss_mask)], GRPO())


def test_rewards_of_a_sample_without_trained_tokens_count_in_its_group() -> None:
    samples = to_samples([Episode(0, 1.0, (Turn(0, 2, 0.5),)), Episode(0, 0.0, (Turn(0, 1, 0.25),))])
    samples[1] = replace(samples[1], loss_mask=torch.zeros_like(samples[1].loss_mask))
    assert advantages(assign(samples, GRPO(norm_by_std=False)))[0] == [0.625, 0.625]


# --- an episode of several samples counts once ------------------------------------------------------------------------

ONCE = {
    **{name: ESTIMATORS.get(name)() for name in ESTIMATORS},
    "grpo without std": GRPO(norm_by_std=False),
    "reinforce leave_one_out": Reinforce("leave_one_out", whiten=False),
    "reinforce_plus_plus by turn": ReinforcePlusPlus(0.5, gamma_per="turn"),
    "gae by turn": GAE(0.5, 0.9, gamma_per="turn"),
}


def split(episodes: list[Episode]) -> list[Episode]:
    """The same episodes, each of more than one turn in two or three samples."""
    forks = [(1, 2) if len(one.turns) > 3 else (1,) if len(one.turns) > 1 else () for one in episodes]
    return [replace(one, forks=own) for one, own in zip(episodes, forks, strict=True)]


@pytest.mark.parametrize(
    ("name", "kl"), [(name, None) for name in ONCE] + [(name, "kl") for name in ONCE if name != "gdpo"]
)
def test_an_episode_in_several_samples_has_the_advantages_of_the_whole(name: str, kl: str | None) -> None:
    episodes = [replace(one, outcome=one.outcome + 2) for one in draw_episodes(3)]
    whole, forked = to_samples(episodes), to_samples(split(episodes))
    assert len(forked) > len(whole)
    draw = torch.Generator().manual_seed(0)
    numbers = {field: -torch.rand(100, generator=draw) for field in ("old_logprobs", "ref_logprobs", "values")}
    found = []
    for samples in (whole, forked):
        given = with_tokens(samples, **{field: drawn[: trained(samples).sum()] for field, drawn in numbers.items()})
        given = with_tokens(given, squared_probs=tokens(given, "old_logprobs").exp().square())
        assigned = assign(
            given, ONCE[name], baselines=[one.outcome for one in episodes], kl_penalty=kl, kl_coef=0.1,
            parts=[{"a": one.outcome, "b": one.outcome**2} for one in episodes],
        )  # fmt: skip
        found.append([value for own in advantages(assigned) for value in own])
    assert len(set(found[0])) > 1
    assert found[1] == found[0]


def test_gae_of_an_episode_in_two_samples_credits_the_first_with_what_the_second_earned() -> None:
    [episode] = split([Episode(0, 4.0, (Turn(0, 2, 1.0), Turn(0, 2, 2.0)))])
    samples = [replace(one, values=torch.zeros(len(one.token_ids))) for one in to_samples([episode])]
    found = assign(samples, GAE())
    assert [own.returns[own.loss_mask].tolist() for own in found] == [[7.0, 7.0], [6.0, 6.0]]


def test_samples_of_no_episode_are_their_own() -> None:
    forked = to_samples(split(draw_episodes(3)))
    alone = [replace(one, episode_id=-1) for one in forked]
    distinct = [replace(one, episode_id=number) for number, one in enumerate(forked)]
    assert advantages(assign(alone, GRPO())) == advantages(assign(distinct, GRPO()))
    assert advantages(assign(alone, GRPO())) != advantages(assign(forked, GRPO()))


def test_samples_of_an_episode_stand_together_with_one_group_and_one_reward() -> None:
    first, second = to_samples(split([Episode(4, 1.0, (Turn(0, 2, 1.0), Turn(0, 2, 2.0)))]))
    [other] = to_samples([Episode(4, 0.0, (Turn(0, 2, 1.0),))])
    for samples, message in (
        ([first, replace(other, episode_id=1), second], "with episode_id 0, and the sample before it has 1"),
        ([first, replace(second, group_id=5)], "with group_id 5, and the sample before it has 4"),
        ([first, replace(second, reward=0.0)], r"with reward 0.0, and the sample before it has 1.0"),
    ):
        with pytest.raises(ValueError, match=f"sample {len(samples) - 1} continues episode 0 {message}"):
            assign(samples, GRPO())
