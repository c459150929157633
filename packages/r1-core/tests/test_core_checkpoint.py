"""Checkpoints of one process: how files are cut and dealt out, and what is said of a folder that does not fit."""

import binascii
import json

import pytest
import torch
from core_models import qwen2, text_samples
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner, checkpoint, tensor_files
from r1_core.learner.optim import build_optimizer
from r1_core.learner.parallel import Parallel
from r1_core.learner.tensor_files import cut, find_tensors, owners, read_tensors, write_tensors
from r1_core.learner.tensor_files import save as save_tensors
from r1_core.objective import Objective

ALONE = Parallel()
FILE_BYTES = 4000


def learner_for(seed=0):
    model = qwen2(seed)
    return Learner(model, build_optimizer(model.named_parameters(), lr=1e-2), lambda step: 1.0)


def step(learner, seed):
    samples = assign(learner.add_logprobs(text_samples(seed=seed)), GRPO())
    return {**learner.forward_backward(samples, Objective()), **learner.optim_step()}


@pytest.fixture
def saved(tmp_path):
    """The folder of a checkpoint after one step, in several files, and the learner that wrote it."""
    learner = learner_for()
    step(learner, 1)
    learner.save(tmp_path, file_bytes=FILE_BYTES)
    return tmp_path, learner


def test_large_checkpoints_are_numbered_files_with_an_index(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}
    write_tensors(tmp_path, {"model": tensors}, ALONE, file_bytes=80)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == [*(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    assert index["weight_map"]["t4"] == "model-00003-of-00003.safetensors"
    read = {name: torch.zeros(10) for name in tensors}
    read_tensors(find_tensors(tmp_path, "model"), read, tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_the_index_of_a_small_checkpoint_names_the_models_file_and_not_the_optimizers(tmp_path):
    """vLLM loads all safetensors files of a folder that its index does not leave out."""
    learner = learner_for()
    step(learner, 1)
    learner.save(tmp_path)
    (index,) = tmp_path.glob("*.index.json")
    weight_map = json.loads(index.read_text())["weight_map"]
    assert set(weight_map.values()) == {"model.safetensors"}
    assert weight_map.keys() == load_file(tmp_path / "model.safetensors").keys()
    index.unlink()  # as those have it that were written before there was one
    resumed = learner_for(seed=9)
    resumed.load(tmp_path)
    assert step(resumed, 2) == step(learner, 2)


def test_a_snapshot_writes_what_was_when_it_was_taken(saved, tmp_path):
    folder, learner = saved
    taken = learner.snapshot(file_bytes=FILE_BYTES)
    assert learner.snapshot(max_bytes=1000) is None, "there is no room for it"
    step(learner, 2)
    taken.write(tmp_path / "later")
    names = sorted(file.name for file in folder.iterdir() if file.is_file())
    assert names == sorted(file.name for file in (tmp_path / "later").iterdir())
    assert all((folder / name).read_bytes() == (tmp_path / "later" / name).read_bytes() for name in names)


def test_a_tensor_larger_than_a_file_has_one_of_its_own():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(100), "c": torch.zeros(2)}
    assert [file.tensors for file in cut("model", tensors, file_bytes=40)] == [("a",), ("b",), ("c",)]
    assert [file.name for file in cut("model", {}, file_bytes=40)] == ["model.safetensors"]


@pytest.mark.parametrize("world", [1, 2, 8, 64])
def test_ranks_write_bytes_within_a_fifth_of_each_other(world):
    """A 32B model's layers in bfloat16 with AdamW's states."""
    with torch.device("meta"):
        layer = {"q": (5120, 5120), "k": (1024, 5120), "v": (1024, 5120), "o": (5120, 5120),
                 "gate": (27648, 5120), "up": (27648, 5120), "down": (5120, 27648), "norm": (5120,)}  # fmt: skip
        model = {f"{i}.{name}": torch.empty(shape) for i in range(64) for name, shape in layer.items()}
        states = {f"{key}.{name}": tensor for name, tensor in model.items() for key in ("exp_avg", "exp_avg_sq")}
    files = [*cut("model", model), *cut("optimizer", states)]
    loads = [0] * world
    for file, owner in zip(files, owners(files, world), strict=True):
        loads[owner] += file.num_bytes
    mean = sum(loads) / world
    assert max(loads) / mean < 1.2 if world < 64 else max(loads) - min(loads) <= max(f.num_bytes for f in files)


def test_a_checkpoint_in_many_files_gives_the_bits_of_not_having_stopped(saved):
    folder, learner = saved
    assert len([*folder.glob("model-*-of-*.safetensors")]) > 3
    assert len([*folder.glob("optimizer-*-of-*.safetensors")]) > 3
    assert all(file.stat().st_size < FILE_BYTES + 4096 for file in folder.glob("*.safetensors"))
    resumed = learner_for(seed=9)
    resumed.load(folder)
    assert step(resumed, 2) == step(learner, 2)
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in learner.weights())


def test_transformers_reads_the_files_of_a_large_checkpoint(saved):
    folder, learner = saved
    learner.model.config.save_pretrained(folder)
    read = type(learner.model).from_pretrained(folder)
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in learner.weights())


class Odd(nn.Module):
    """Scalars, empty tensors, and buffers that are kept and that are not."""

    def __init__(self, fill):
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(float(fill)))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.flags = nn.Parameter(torch.full((2,), bool(fill)), requires_grad=False)
        self.register_buffer("count", torch.tensor(fill))
        self.register_buffer("passing", torch.tensor(fill), persistent=False)


def test_scalars_empty_tensors_and_buffers_are_kept(tmp_path):
    checkpoint.save(tmp_path, Odd(1), None, {}, ALONE, FILE_BYTES)
    read = Odd(0)
    checkpoint.load_model(tmp_path, read)
    assert (read.scalar, read.count, read.passing, read.flags.tolist()) == (1, 1, 0, [True, True])


def test_a_part_is_read_from_its_own_files_whatever_else_lies_in_the_folder(saved):
    folder, learner = saved
    (folder / "optimizer-00001-of-00099.safetensors").write_bytes(b"not one of them")
    save_file({"model.norm.weight": torch.zeros(16)}, folder / "other.safetensors")
    resumed = learner_for(seed=9)
    resumed.load(folder)
    assert all(torch.equal(tensor, dict(resumed.weights())[name]) for name, tensor in learner.weights())


def test_a_folder_without_a_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        learner_for().load(tmp_path, model_only=True)
    with pytest.raises(FileNotFoundError, match=r"learner\.json"):
        learner_for().load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda weights: weights.update(other=torch.zeros(1)), "'other' is not in the model"),
        (lambda weights: weights.update({"lm_head.weight": torch.zeros(1)}), r"'lm_head\.weight' has shape \[1\]"),
        (lambda weights: weights.pop("lm_head.weight"), r"'lm_head\.weight' is missing \(1 in all\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_tensor(change, says, tmp_path):
    learner = learner_for()
    weights = dict(learner.weights())
    change(weights)
    write_tensors(tmp_path, {"model": weights}, ALONE)
    with pytest.raises(ValueError, match=says):
        learner.load(tmp_path, model_only=True)


def test_states_that_do_not_fit_are_refused_by_tensor(tmp_path):
    learner = learner_for()
    step(learner, 1)
    learner.save(tmp_path)
    file = tmp_path / "optimizer.safetensors"
    states = load_file(file)
    save_file({**states, "exp_avg.other": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"'exp_avg\.other' belongs to no trained parameter"):
        learner.load(tmp_path)
    save_file({**states, "exp_avg.lm_head.weight": torch.zeros(1)}, file)
    with pytest.raises(ValueError, match=r"'exp_avg\.lm_head\.weight' has shape \[1\]"):
        learner.load(tmp_path)
    for lost in ({"exp_avg.lm_head.weight"}, {"exp_avg.lm_head.weight", "exp_avg_sq.lm_head.weight"}):
        save_file({name: tensor for name, tensor in states.items() if name not in lost}, file)
        with pytest.raises(ValueError, match=r"'exp_avg\.lm_head\.weight' is missing"):
            learner.load(tmp_path)


def test_a_missing_or_truncated_file_is_named(saved):
    folder, _ = saved
    file = sorted(folder.glob("model-*"))[1]
    whole = file.read_bytes()
    for length in (len(whole) - 1, 20, 4, 0):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=rf"{file.name} is truncated"):
            learner_for().load(folder)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=rf"{file.name} is missing"):
        learner_for().load(folder)


def test_an_index_that_disagrees_with_its_files_is_named(saved):
    folder, _ = saved
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    file = index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{file} holds 'model\.norm\.weight', but {path.name} does not say so"):
        learner_for().load(folder)
    index["weight_map"] |= {"model.norm.weight": file, "more": file}
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"{file} does not hold 'more', but {path.name} says so"):
        learner_for().load(folder)
    path.write_text('{"weight_map"')
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is no index"):
        learner_for().load(folder)


def test_truncated_numbers_are_named(saved):
    folder, _ = saved
    path = folder / "learner.json"
    path.write_text(path.read_text()[:30])
    with pytest.raises(ValueError, match=r"learner\.json is truncated"):
        learner_for().load(folder)


def test_a_full_disk_is_an_error_and_no_file_is_passed_over(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(tensor_files, "save_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        learner_for().save(tmp_path)


def test_the_header_has_the_checksum_of_each_tensor_and_equal_tensors_give_equal_files(tmp_path):
    tensors = {
        "b": torch.arange(6.0).reshape(2, 3),
        "a": torch.tensor(True),
        "ä": torch.zeros(0),
        "c": torch.ones(3).bfloat16(),
    }
    contents = set()
    for place in range(8):  # safetensors draws the order of its metadata
        save_tensors(dict(tensors), tmp_path / f"{place}.safetensors")
        contents.add((tmp_path / f"{place}.safetensors").read_bytes())
    assert len(contents) == 1
    with safe_open(tmp_path / "0.safetensors", "pt") as opened:
        written = json.loads(opened.metadata()["crc32"])
        assert opened.metadata()["format"] == "pt"
        for name, tensor in tensors.items():
            assert torch.equal(opened.get_tensor(name), tensor)
            assert written[name] == binascii.crc32(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
