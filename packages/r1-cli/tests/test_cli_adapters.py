"""An adapter on a frozen base: the same on any number of ranks, with the base as its reference, as peft reads it."""

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from cli_adapters import NAMES, build, compute_as_ever, learn, make_folders, take_step
from torch import Tensor

from r1_cli.models.adapters import Form


@pytest.fixture(autouse=True)
def computing_is_put_back() -> Any:
    yield
    compute_as_ever()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {name: make_folders(tmp_path_factory.mktemp(name), name) for name in NAMES}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=atol, rtol=0, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("shard_size", [-1, 1])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_train_the_adapter_that_one_process_trains(folders: Any, name: str, shard_size: int) -> None:
    metrics, factors = learn(*folders[name], name)
    for own, found in ranks.run(learn, *folders[name], name, shard_size):
        assert own == [pytest.approx(expected, abs=1e-9) for expected in metrics]
        assert_close(found, factors, 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_base_as_a_model_of_its_own_would_be(folders: Any, name: str) -> None:
    base, adapter = folders[name]
    form = Form(4, 8, "all-linear", ".*visual.*", adapter)
    one, two = build(base, form), build(base, form, separate=True)
    for seed, objective in enumerate(("KL", "full KL")):
        own, wanted = (take_step(learner, name, objective, seed) for learner in (one, two))
        assert own["kl_loss"] == pytest.approx(wanted["kl_loss"], abs=1e-10)
        assert own["kl_loss"] > 1e-4
        assert own == pytest.approx(wanted, abs=1e-9)
