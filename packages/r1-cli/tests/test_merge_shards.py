"""`r1 merge` of EasyR1's and veRL's checkpoints: exact, and nothing of a file is executed."""

import os
import pickle
import resource
import shutil
from pathlib import Path
from typing import Any

import cli_shards
import pytest
import ranks
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch.serialization import get_safe_globals

from r1_cli.jobs.merge import merge
from r1_cli.main import main
from r1_cli.models.load import ModelError
from r1_cli.models.verl_shards import ShardError, read_shards


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("easyr1") / "global_step_3"
    cli_shards.write_alone(folder / "actor", "FSDP2", torch.float32, False)
    return folder


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "global_step_3"))


def assert_exact(checkpoint: Path, dtype: torch.dtype, tied: bool) -> None:
    registered = set(get_safe_globals())
    merged = merge(checkpoint)
    assert merged == checkpoint / "actor/huggingface"
    expected = cli_shards.make_model(dtype, tied=tied).state_dict()
    found = load_file(merged / "model.safetensors")
    assert found.keys() == expected.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(tensor, expected[name]) and tensor.dtype == dtype for name, tensor in found.items())
    assert set(get_safe_globals()) == registered


@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_merged_uneven_shards_are_exactly_the_unsharded_model(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    cli_shards.write_alone(tmp_path / "actor", "FSDP2", dtype, tied)
    assert_exact(tmp_path, dtype, tied)


@pytest.mark.slow
@pytest.mark.parametrize("kind", cli_shards.KINDS)
@pytest.mark.parametrize(("dtype", "tied"), [(torch.bfloat16, True), (torch.float32, False)], ids=str)
def test_shards_of_ranks_merge_exactly_however_they_were_sharded(
    kind: str, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    ranks.run(cli_shards.write, tmp_path / "actor", kind, dtype, tied)
    assert_exact(tmp_path, dtype, tied)


def test_an_adapter_beside_shards_is_folded_into_their_base_as_peft_does(tmp_path: Path) -> None:
    cli_shards.write_alone(tmp_path / "actor", "FSDP2", torch.float32, False, True)
    found = load_file(merge(tmp_path, tmp_path / "merged") / "model.safetensors")
    torch.manual_seed(0)
    expected = cli_shards.add_adapter(cli_shards.make_model(torch.float32, tied=False)).merge_and_unload().state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.allclose(tensor, expected[name], atol=1e-6, rtol=0) for name, tensor in found.items())
    shutil.rmtree(tmp_path / "actor/lora_adapter")
    with pytest.raises(ModelError, match=r"lora_adapter/adapter_config\.json is missing"):
        merge(tmp_path)


class Hostile:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_a_shard_that_would_execute_something_is_refused_by_its_name(copied: Path) -> None:
    file, planted = copied / "actor/model_world_size_2_rank_1.pt", copied / "planted"
    torch.save({"weight": Hostile(f"touch {planted}")}, file)
    with pytest.raises(
        ShardError, match=r"rank_1\.pt is refused: its pickle names posix\.system.*Nothing in it was executed"
    ):
        merge(copied)
    assert not planted.exists()
    file.write_bytes(pickle.dumps(Hostile(f"touch {planted}")))
    with pytest.raises(ShardError, match=r"rank_1\.pt"):
        merge(copied)
    assert not planted.exists()


def test_what_getattr_would_reach_through_torch_is_never_looked_up(copied: Path) -> None:
    class Reaching:
        def __reduce__(self) -> Any:
            return getattr, (torch.bfloat16, "itemsize")

    file = copied / "actor/model_world_size_2_rank_1.pt"
    torch.save({"weight": Reaching()}, file)
    with pytest.raises(ShardError, match="holds no state dict of tensors"):
        merge(copied)


def test_a_missing_a_cut_off_or_an_odd_shard_is_named(copied: Path) -> None:
    first, second = (copied / f"actor/model_world_size_2_rank_{rank}.pt" for rank in range(2))
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ShardError, match=r"rank_1\.pt cannot be read"):
        merge(copied)
    shutil.copy(first, second)
    with pytest.raises(ShardError, match="the shards make"):
        merge(copied)
    second.unlink()
    with pytest.raises(ShardError, match=r"1 of 2 shards are missing \(model_world_size_2_rank_1\.pt\)"):
        merge(copied)
    shutil.copy(first, copied / "actor/model_world_size_4_rank_0.pt")
    with pytest.raises(ShardError, match=r"several world sizes \(\[2, 4\]\)"):
        merge(copied)


def test_tensors_that_are_no_shards_must_be_equal_on_all_ranks(tmp_path: Path) -> None:
    files = [tmp_path / f"model_world_size_2_rank_{rank}.pt" for rank in range(2)]
    for value, file in enumerate(files):
        torch.save({"scale": torch.ones(2), "offset": torch.full((2,), float(value))}, file)
    with pytest.raises(ShardError, match="offset differs between ranks"):
        read_shards(files)


def test_a_folder_without_any_model_says_what_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"neither config\.json nor model_world_size_\*_rank_\*\.pt"):
        merge(tmp_path)


def test_a_checkpoint_that_is_cut_off_is_named_with_its_file(tmp_path: Path) -> None:
    actor = tmp_path / "global_step_3/actor"
    shutil.copytree(Path(__file__).parents[3] / "examples/quickstart/model", actor)
    os.truncate(actor / "model.safetensors", 2000)
    ended = CliRunner().invoke(main, ["merge", str(actor)])
    assert ended.exit_code == 2
    assert ended.stderr.startswith(f"r1: {actor} is damaged (model.safetensors: its header is cut off): copy it")


def test_a_disk_that_is_full_is_said_with_the_folder(copied: Path, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, before[1]))
    try:
        told = CliRunner().invoke(main, ["merge", str(copied), "--output", str(tmp_path / "merged")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert told.exit_code == 2, (told.output, told.exception)
    assert f"{tmp_path / 'merged'} cannot be written" in told.output
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_3"]
