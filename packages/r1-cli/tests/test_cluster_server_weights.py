"""Servers under ranks: these write the folder together, or rank 0 sends; the driver decides who, and sees no tensor."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import cli_adapters
import cli_spreading
import pytest
import torch
from cli_spreading import Faulty, OnRanks, all_weights
from fake_vllm import FakeServer
from safetensors.torch import load_file
from server_pools import PARAMS, Pools, all_ready, prompts, wait_for

from r1_core.learner.parallel import Parallel
from r1_rollout.transports.adapter import write_adapter
from r1_rollout.transports.folder import ShardWriter, write_shards, write_source
from r1_rollout.weights import LocalWeights

FILE = 5000  # bytes; some tensors are larger


@pytest.fixture
def pools() -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(stack)


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """What one process has of the weights that the ranks share."""
    learner, _ = all_weights(Parallel())
    return {name: tensor.detach().clone() for name, tensor in learner.weights()}


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def answered(pool: Any, source: Any) -> None:
    with pool.active(source):
        assert len(dict(pool.generate(prompts(4), PARAMS))) == 4


def test_one_process_writes_buckets_as_they_come_and_a_pass_leaves_no_half_folder(tmp_path: Path, whole: Any) -> None:
    assert write_shards(whole.items(), tmp_path / "w", FILE) == {name: tuple(t.shape) for name, t in whole.items()}
    found = {name: tensor for file in (tmp_path / "w").iterdir() for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())
    with pytest.raises(FileNotFoundError, match="give a folder that every machine sees"):
        write_shards(whole.items(), tmp_path / "elsewhere" / "w", FILE)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ranks_write_together_the_very_files_that_one_process_writes(
    tmp_path: Path, whole: Any, dtype: torch.dtype | None
) -> None:
    source = OnRanks(all_weights)
    written = write_source(source, tmp_path / "ranks", FILE, dtype)
    assert written == write_shards(whole.items(), tmp_path / "one", FILE, dtype)
    assert content(tmp_path / "ranks") == content(tmp_path / "one")
    assert source.written is not None
    sizes = {int(name.partition(".")[0]): len(file) for name, file in content(tmp_path / "one").items()}
    assert sorted(chain.from_iterable(source.written)) == sorted(sizes)
    shares = [sum(sizes[number] for number in own) for own in source.written]
    assert max(shares) - min(shares) <= max(sizes.values())


@pytest.mark.slow
def test_ranks_that_do_not_see_the_folder_leave_it_to_the_others_and_none_is_an_error(
    tmp_path: Path, whole: Any
) -> None:
    source = Faulty(all_weights, fault="unseen", faulty=0)
    write_source(source, tmp_path / "ranks", FILE)
    assert source.written is not None
    assert source.written[0] == []
    write_shards(whole.items(), tmp_path / "one", FILE)
    assert content(tmp_path / "ranks") == content(tmp_path / "one")
    with pytest.raises(FileNotFoundError, match="every machine sees"):
        OnRanks(all_weights).spread(ShardWriter(tmp_path / "gone"), FILE, None)


@pytest.mark.slow
def test_a_rank_that_cannot_write_is_named_nothing_is_taken_up_and_the_next_push_is_good(
    pools: Pools, whole: Any
) -> None:
    fake, source = FakeServer(), Faulty(all_weights, fault="")
    pool = pools.open(fake, bucket_bytes=FILE)
    answered(pool, source)
    source.version, source.fault = 1, "full"
    with pytest.raises(OSError, match="No space left on device, rank 1"), pool.active(source):
        pass
    assert [label.partition("-")[0] for label in fake.loads] == ["0"]
    assert [path.name.partition("-")[0] for path in pool._root.iterdir()] == ["0"]
    with pytest.raises(RuntimeError, match="needs an active pool"):
        pool.generate(prompts(1), PARAMS)
    source.version, source.fault = 2, ""
    answered(pool, source)
    assert [label.partition("-")[0] for label in fake.loads] == ["0", "2"]
    assert len(content(next(pool._root.iterdir()))) > 5


@pytest.mark.slow
def test_a_broadcast_is_sent_by_the_first_rank_to_the_servers_that_the_driver_names(pools: Pools, whole: Any) -> None:
    fakes = [FakeServer(), FakeServer()]
    fakes[1].update_fault = lambda number: "reject" if number == 3 else None  # in the first push
    pool = pools.open(*fakes, broadcast="r1_tcp", bucket_bytes=FILE, dtype=torch.float32)
    source = OnRanks(all_weights)
    for source.version in range(2):
        answered(pool, source)
        wait_for(lambda: all_ready(pool))
    for fake in fakes:
        assert [label.partition("-")[0] for label in fake.loads] == ["0", "1"]
        assert fake.received.keys() == whole.keys()
        assert all(torch.equal(fake.received[name], tensor.float()) for name, tensor in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("broadcast", [None, "r1_tcp"])
def test_an_adapter_of_ranks_is_the_file_that_one_process_writes(pools: Pools, tmp_path: Path, broadcast: Any) -> None:
    base, folder = cli_adapters.make_folders(tmp_path, "text")
    expected, one = cli_spreading.factors(base, folder), tmp_path / "one"
    one.mkdir()
    write_adapter(expected, one)
    fake = FakeServer()
    pool = pools.open(fake, base=base, broadcast=broadcast)
    with pool.active(OnRanks(partial(cli_spreading.adapter, base, folder), form=expected)):
        (pushed,) = pool._root.iterdir()
        assert content(pushed) == content(one)
    assert len(fake.adapters) == 1


def test_a_socket_on_another_machine_cannot_be_sent_weights(tmp_path: Path) -> None:
    from r1_rollout.vllm.client import Endpoint, ServerFault
    from r1_rollout.vllm.servers.direct import ServerReceiver, push

    server = ServerReceiver("vLLM server 0", Endpoint(f"unix:{tmp_path}/socket"), "r1_tcp", 60.0)
    sent = LocalWeights([("w", torch.ones(3))], 0).run_with_weights(
        partial(push, receivers=[server], label="0-a", folder=tmp_path / "w", max_bytes=100, dtype=None, first={})
    )
    (fault,) = sent.faults
    assert isinstance(fault, ServerFault)
    assert "vLLM server 0: it is not on the machine of the process that has the weights" in str(fault)
    assert content(tmp_path / "w")  # which it can be given later
