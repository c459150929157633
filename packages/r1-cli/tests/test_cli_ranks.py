"""A learner whose ranks are elsewhere gives what the learner itself gives, and little crosses."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from cli_ranks import LOADS, OBJECTIVES, STORE, OneRank, build, go_through, step_samples
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

from r1_cli.cluster.learner import RankedLearner
from r1_cli.cluster.rank import Rank
from r1_core.advantages import GRPO, assign
from r1_core.learner.parallel import Parallel
from r1_core.types import Sample


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """The vision models' rotation is turned to float64 by `build`, for all that come after."""
    own = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    yield
    modeling_qwen2_5_vl.apply_rotary_pos_emb_vision = own
    STORE.clear()
    LOADS.clear()


def ranked(name: str = "text", objective: str = "KL") -> tuple[RankedLearner, OneRank]:
    rank = Rank(partial(build, name, objective))
    rank.join()
    ranks = OneRank(rank)
    return RankedLearner(ranks), ranks


def advantaged(samples: list[Sample]) -> list[Sample]:
    return assign([replace(s, old_logprobs=-torch.ones(len(s.token_ids))) for s in samples], GRPO())


@pytest.mark.parametrize(
    ("name", "objective"),
    [("text", "KL"), ("text", "full KL"), ("text", "own loss"), ("pictures", "KL"), ("video", "KL")],
)
def test_verb_by_verb_it_gives_what_the_learner_gives(name: str, objective: str) -> None:
    learner, _ = build(name, objective, Parallel())
    expected = go_through(learner, step_samples(name), OBJECTIVES[objective])
    found = go_through(ranked(name, objective)[0], step_samples(name), OBJECTIVES[objective])
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
