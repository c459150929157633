"""Makes what the tests share importable by them and by their processes: r1-core's models, servers of two more.

Fixtures: the quickstart's model, and what it plays with the tests' environment `Album`.
"""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cli_players import Toy

    from r1_cli.train.groups.trajectory import Trajectory
    from r1_data.types import Prompt

PACKAGES = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(PACKAGES / "r1-core/tests"), str(PACKAGES / "r1-rollout/tests")]
sys.path.append(str(PACKAGES / "r1-rewards/tests"))


@pytest.fixture(scope="session")
def toy() -> "Toy":
    from cli_players import Toy

    return Toy()


@pytest.fixture(scope="module")
def prompts(toy: "Toy") -> "list[Prompt]":
    return toy.prompts("3", "2")


@pytest.fixture(scope="module")
def groups(toy: "Toy", prompts: "list[Prompt]") -> "list[list[Trajectory]]":
    with ExitStack() as stack:
        return toy.play(toy.player(stack), prompts)
