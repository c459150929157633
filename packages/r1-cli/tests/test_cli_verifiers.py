"""Several rewards in one run: each answer is judged by its source's, in order, and batches stay whole."""

from collections.abc import Sequence

import pytest

from r1_cli.build.rewards.dispatch import DispatchingVerifier
from r1_rewards.types import RewardInput, Score


class Constant:
    def __init__(self, value: float) -> None:
        self.value, self.calls = value, list[list[str]]()

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        self.calls.append([item.response for item in inputs])
        return [Score(self.value)] * len(inputs)


def test_answers_go_to_their_sources_verifier_and_come_back_in_order() -> None:
    default, own = Constant(0.0), Constant(1.0)
    verifier = DispatchingVerifier(default, {"text": own, "more": own})
    sources = ["text", "pictures", "more", "", "text"]
    inputs = [RewardInput(str(i), "1", source=source) for i, source in enumerate(sources)]
    assert [score.value for score in verifier(inputs)] == [1, 0, 1, 0, 1]
    assert (default.calls, own.calls) == ([["1", "3"]], [["0", "2", "4"]])
    assert verifier([]) == []


def test_a_source_without_a_verifier_is_named() -> None:
    with pytest.raises(ValueError, match="no verifier judges rows of source 'text'"):
        DispatchingVerifier(None, {})([RewardInput("1", "1", source="text")])
