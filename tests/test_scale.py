"""With four times the ranks and engines, messages and bytes of a step and of a weight sync are four times as many."""

import importlib
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FEW, MANY = 8, 32


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module of `benchmarks/scale_parts` by name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"scale_parts.{name}")


def grown(measure: Any) -> dict[str, float]:
    """Return how many times as large each count is with many ranks, without seconds."""
    few, many = measure(FEW), measure(MANY)
    return {name: many[name] / few[name] for name in few if not name.endswith(" s")}


def test_a_step_of_as_many_sequences_for_each_rank_grows_as_the_ranks(simulated: Any) -> None:
    found = grown(lambda count: simulated("steps").measure(count, 32 * count, 520))
    assert found["step messages"] == MANY / FEW
    assert max(found.values()) < 1.05 * MANY / FEW


@pytest.mark.parametrize("direct", [False, True])
def test_a_weight_sync_with_its_proofs_grows_as_ranks_and_engines(simulated: Any, direct: bool) -> None:
    found = grown(lambda count: simulated("sync").measure(count, direct=direct))
    assert max(found.values()) == MANY / FEW  # messages
