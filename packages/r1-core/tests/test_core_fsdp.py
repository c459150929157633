"""Two ranks under FSDP2 are the same learner as one process."""

from pathlib import Path

import pytest
import torch
import two_ranks
from fsdp_rank import MODELS, learner_for, step
from safetensors.torch import load_file
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl

pytestmark = pytest.mark.slow

RANK = Path(__file__).with_name("fsdp_rank.py")


@pytest.fixture(autouse=True, scope="module")
def vision_rotation_is_put_back():
    """`learner_for` runs in this process, too, and turns the models' rotation to float64 for all that come after."""
    own = modeling_qwen2_5_vl.apply_rotary_pos_emb_vision
    yield
    modeling_qwen2_5_vl.apply_rotary_pos_emb_vision = own


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which one process (`single…`) and then two ranks have trained each model."""
    folder = tmp_path_factory.mktemp("fsdp")
    for name in MODELS:
        learner = learner_for(name)
        for i in (1, 2, 3):
            step(learner, name)
            learner.save(folder / name / f"single{i}")
    two_ranks.run(RANK, folder)
    return folder


def assert_same(folder, other):
    for file in ("model.safetensors", "optimizer.safetensors"):
        tensors, others = load_file(folder / file), load_file(other / file)
        assert tensors.keys() == others.keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, others[name], atol=1e-9, rtol=0, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_take_the_steps_of_one_process(name, folder):
    for i in (1, 2, 3):
        assert_same(folder / name / f"after{i}", folder / name / f"single{i}")


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_go_on_from_the_checkpoint_of_one_process(name, folder):
    assert_same(folder / name / "resumed", folder / name / "single2")


@pytest.mark.parametrize("name", MODELS)
def test_one_process_goes_on_from_the_checkpoint_of_two_ranks(name, folder, tmp_path):
    learner = learner_for(name)
    learner.load(folder / name / "after1")
    step(learner, name)
    learner.save(tmp_path)
    assert_same(tmp_path, folder / name / "single2")
