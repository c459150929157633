"""Weights by broadcast reach every server bucket by bucket; who dies, hangs or refuses on the way holds up nobody."""

import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_vllm import FakeServer
from server_pools import PARAMS, Pools, adapter, all_ready, prompts, wait_for, weights

import r1_rollout
from r1_rollout.errors import WeightsError
from r1_rollout.transports.groups import NcclGroup, TcpGroup, TcpReceiver
from r1_rollout.vllm.client import Endpoint
from r1_rollout.vllm.servers import direct
from r1_rollout.vllm.servers.direct import own_address
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.server import LocalServer
from r1_rollout.vllm.servers.supervisor import ServersLost
from r1_rollout.weights import LocalWeights

FAKE = Path(__file__).with_name("fake_vllm.py")
SOURCES = str(Path(r1_rollout.__file__).parents[1])
BY_TWOS: dict[str, Any] = {"broadcast": "r1_tcp", "bucket_bytes": 32}  # buckets of two tensors
NAMES = [f"w{i}" for i in range(5)]


def local(**environment: str) -> LocalServer:
    environment["PYTHONPATH"] = os.pathsep.join([SOURCES, os.environ.get("PYTHONPATH", "")])
    return LocalServer(
        lambda path: [sys.executable, str(FAKE), path], name="mortal", environment=environment, start_timeout=120
    )


def test_every_server_gets_every_tensor_in_vllms_order_of_calls(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes, **BY_TWOS)
    sent = [*weights(5), ("scalar", torch.tensor(3)), ("wide", torch.arange(12.0).reshape(3, 4).T)]
    with pool.active(LocalWeights(sent, 4)):
        assert len(dict(pool.generate(prompts(8), PARAMS))) == 8
    for fake in fakes:
        assert fake.calls == [
            "r1_begin", "/get_world_size", "/init_weight_transfer_engine", "/start_weight_update",
            *["/update_weights"] * 4, "/finish_weight_update", "r1_commit",
            "/reset_mm_cache", "/reset_encoder_cache",
        ]  # fmt: skip
        assert all(torch.equal(fake.received[name], tensor) for name, tensor in sent)
        assert [label.partition("-")[0] for label in fake.loads] == ["4"]


def test_masters_in_float32_arrive_in_the_precision_asked_for(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake, dtype=torch.bfloat16, **BY_TWOS)
    master = torch.randn(3, 5)
    with pool.active(LocalWeights([("w", master), ("steps", torch.tensor([7]))], 0)):
        assert torch.equal(fake.received["w"], master.bfloat16())
        assert torch.equal(fake.received["steps"], torch.tensor([7]))


def test_one_bucket_exists_at_a_time_and_each_tensor_is_made_once(pools: Pools) -> None:
    made: list[str] = []

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(5):
            updates = {fake.updates for fake in fakes}
            assert len(updates) == 1, f"{name} is made before all servers have the last bucket"
            made.append(name)
            yield name, tensor

    fakes = [FakeServer() for _ in range(3)]
    pool = pools.open(*fakes, **BY_TWOS)
    with pool.active(LocalWeights(stream(), 0)):
        assert made == NAMES


@pytest.mark.slow
def test_a_server_that_dies_in_a_push_gets_the_weights_from_the_folder_and_the_others_go_on(pools: Pools) -> None:
    good, mortal = FakeServer(), local(FAKE_UPDATE_DIES_AT="1")
    pool = pools.open(good, mortal, **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 3)):
        assert sorted(good.received) == NAMES
        assert len(dict(pool.generate(prompts(10), PARAMS))) == 10
        wait_for(lambda: all_ready(pool))  # started anew, it is told the folder: no second broadcast would get through
        assert mortal.alive
    assert good.loads == [good.label]


@pytest.mark.slow
def test_a_server_that_hangs_in_a_push_is_left_after_the_deadline_and_the_others_serve(
    pools: Pools, caplog: pytest.LogCaptureFixture
) -> None:
    good, hung = FakeServer(), FakeServer()
    hung.update_fault = lambda number: "hang" if number == 1 else None
    pool = pools.open(good, hung, deadlines=Deadlines(stall=60, load=20.0, probe=0.01, recovery=120), **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 3)):
        assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
        assert sorted(good.received) == NAMES
        wait_for(lambda: all_ready(pool))  # it hung in this push only
    hung_up = [record.message for record in caplog.records if "/update_weights: nothing heard for" in record.message]
    assert any(pool._supervisor.servers[1].name in message for message in hung_up)


def test_a_given_server_without_our_disk_returns_by_a_broadcast_of_its_own(pools: Pools) -> None:
    far, other = FakeServer(), FakeServer()
    far.rejects_weights = True  # from a folder, that is
    far.update_fault = lambda number: "reject" if number == 1 else None
    pool = pools.open(far, other, **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 3)):
        wait_for(lambda: all_ready(pool))
        assert all(torch.equal(far.received[name], tensor) for name, tensor in weights(5))
    assert far.loads == other.loads
    assert len(other.loads) == 1


def test_servers_follow_push_after_push_and_serve_no_old_weights(pools: Pools) -> None:
    fakes = [FakeServer() for _ in range(3)]
    fakes[1].update_fault = lambda number: "reject" if number == 4 else None  # in the second push
    pool = pools.open(*fakes, max_sequences=2, **BY_TWOS)
    for version in range(4):
        with pool.active(LocalWeights(weights(5), version)):
            assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
            wait_for(lambda: all_ready(pool))
    for fake in fakes:
        assert [label.partition("-")[0] for label in fake.loads] == ["0", "1", "2", "3"]
        assert set(fake.served) <= set(fake.loads)
    assert len(list(pool._root.glob("*"))) == 1


def test_weights_that_break_off_leave_servers_that_the_next_push_can_fill(pools: Pools) -> None:
    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights(4)
        raise ValueError("a shard is gone")

    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes, **BY_TWOS)
    for version in range(2):
        with pytest.raises(ValueError, match="a shard is gone"), pool.active(LocalWeights(broken(), version)):
            pass
        with pool.active(LocalWeights(weights(5), version)):
            assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
    assert [len(fake.loads) for fake in fakes] == [2, 2]


def test_weights_that_every_server_rejects_end_the_push_at_once_and_the_next_may_be_good(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes, **BY_TWOS)
    for fake in fakes:
        fake.update_fault = lambda number: "reject"
    with (
        pytest.raises(WeightsError, match=r"no module named w0(.*\n)*.*no module named w0"),
        pool.active(LocalWeights(weights(5), 0)),
    ):
        pass
    assert not list(pool._root.iterdir())
    for fake in fakes:
        fake.update_fault = lambda number: None
    with pool.active(LocalWeights(weights(5), 0)):
        assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
    assert [len(fake.loads) for fake in fakes] == [1, 1]


def test_weights_of_other_names_or_shapes_than_the_first_never_become_a_version(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes, **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 0)):
        pass
    first = fakes[0].base
    for wrong, came, message in [
        (weights(4), NAMES[:4], "1 weights are not those of the first sync: w4 is missing, was [4]"),
        (weights(6), NAMES[:4], "w5 is [4], was unknown"),
        ([*weights(2), ("w2", torch.ones(2, 2)), *weights(5)[3:]], [], "w2 is [2, 2], was [4]"),
    ]:
        fakes[1].update_fault = lambda number: "reject"  # which is not what the push fails by
        with pytest.raises(WeightsError, match=re.escape(message)), pool.active(LocalWeights(wrong, 1)):
            pass
        assert sorted(fakes[0].received) == came
        assert {fake.base for fake in fakes} == {None}
        assert {(server.state, server.label) for server in pool._supervisor.servers} == {("new", None)}
        fakes[1].update_fault = lambda number: None
    with pool.active(LocalWeights(adapter(), 1)):  # upon the base that none of them holds any more
        assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
        assert {fake.base for fake in fakes} == {first}
    with pool.active(LocalWeights(weights(5), 2)):
        assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
    for fake in fakes:
        assert [label.partition("-")[0] for label in fake.loads] == ["0", "0", "1", "2"]


def test_adapters_alone_go_over_the_folder_upon_what_was_broadcast(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes, max_sequences=2, **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 0)):
        pass
    for version in (1, 2):
        with pool.active(LocalWeights(adapter(), version)):
            assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
    with pool.active(LocalWeights(adapter(), 3)):
        fakes[0].forget()
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
        wait_for(lambda: all_ready(pool))
    assert [label.partition("-")[0] for label in fakes[0].loads] == ["0", "1", "2", "3", "0", "3"]
    assert [fake.calls.count("r1_begin") for fake in fakes] == [1, 1]
    with pool.active(LocalWeights(weights(5), 4)):
        assert len(dict(pool.generate(prompts(6), PARAMS))) == 6
    assert [fake.calls.count("r1_begin") for fake in fakes] == [2, 2]


def test_a_server_started_for_another_transfer_is_told_the_option(pools: Pools) -> None:
    fake = FakeServer()
    fake.backend = None
    pool = pools.open(fake, **BY_TWOS)
    with (
        pytest.raises(WeightsError, match=r'--weight-transfer-config={"backend": "r1_tcp"}'),
        pool.active(LocalWeights(weights(5), 0)),
    ):
        pass


def test_a_sender_that_cannot_make_its_end_says_so(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(workers: int, device: torch.device, seconds: float) -> NcclGroup:
        raise RuntimeError("libnccl is not there")

    monkeypatch.setattr(direct, "NcclGroup", no_library)
    fake = FakeServer()
    fake.backend, fake.rejects_weights = "nccl", True
    short = Deadlines(stall=60, load=60, probe=0.01, recovery=0.5)
    pool = pools.open(fake, deadlines=short, broadcast="nccl")
    with (
        pytest.raises(ServersLost, match=r"no group over nccl .*: libnccl is not"),
        pool.active(LocalWeights(weights(5), 0)),
    ):
        pass


def test_a_server_that_only_says_it_took_the_weights_never_serves(pools: Pools) -> None:
    stale, good = FakeServer(), FakeServer()
    stale.keeps_old_weights = True
    pool = pools.open(stale, good, **BY_TWOS)
    with pool.active(LocalWeights(weights(5), 0)):
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
    assert not stale.requests


def test_who_does_not_know_the_secret_stays_out_of_the_group() -> None:
    sender = TcpGroup("127.0.0.1", 1, 60.0)
    port, secret = sender.init_info["port"], sender.init_info["secret"]
    for greeting in (b"", b"x" * 64):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(greeting)
    received = torch.empty(3)
    worker = threading.Thread(target=lambda: TcpReceiver("127.0.0.1", port, secret, 60.0).receive(received))
    worker.start()
    sender.connect()
    sender.send([torch.tensor([1.0, 2.0, 3.0])])
    worker.join(60)
    assert received.tolist() == [1.0, 2.0, 3.0]
    sender.destroy()
    with pytest.raises(OSError, match="does not answer at 127"):
        TcpReceiver("127.0.0.1", port, secret, 60.0)


@pytest.mark.parametrize("stage", ["connect", "send"])
def test_a_group_that_is_ended_lets_go_whoever_waits_in_it(stage: str) -> None:
    sender = TcpGroup("127.0.0.1", 1, 600.0)
    outcome: list[Exception] = []

    def wait() -> None:
        try:
            sender.connect()
            sender.send([torch.zeros(2**24)])  # more than the socket's buffers hold
        except OSError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    if stage == "send":
        idle = TcpReceiver(**sender.init_info)
        wait_for(lambda: bool(sender._sockets))
    sender.destroy()
    thread.join(60)
    assert outcome
    if stage == "send":
        with pytest.raises(OSError, match=r"closed in the middle|reset"):
            idle.receive(torch.empty(2**24))


def test_the_sender_listens_where_the_server_can_reach_it() -> None:
    assert own_address(Endpoint("unix:/tmp/socket")) == "127.0.0.1"
    assert own_address(Endpoint("http://localhost:8000")) == "127.0.0.1"
    assert own_address(Endpoint("http://[::1]:8000")) == "127.0.0.1"
    assert own_address(Endpoint("http://127.0.0.2:8000")) == "127.0.0.1"  # the route to it begins there


def test_on_gpus_the_group_is_joined_used_and_ended_as_vllm_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Communicator:
        def broadcast(self, tensor: torch.Tensor, src: int, stream: Any) -> None:
            calls.append(("broadcast", tensor.tolist(), src))

        def destroy(self) -> None:
            calls.append("destroy")

    def join(unique_id: bytes, rank: int, world_size: int, device: torch.device) -> Communicator:
        calls.append((unique_id, rank, world_size))
        return Communicator()

    stream = SimpleNamespace(
        wait_stream=lambda other: calls.append("wait"), synchronize=lambda: calls.append("synchronize")
    )
    library = SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=list(range(128))))
    wrapper = SimpleNamespace(NCCLLibrary=lambda: library)
    common = SimpleNamespace(uid_init_process_group=join)
    monkeypatch.setitem(sys.modules, "vllm.distributed.device_communicators.pynccl_wrapper", wrapper)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", common)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: ExitStack())
    sender = NcclGroup(2, torch.device("cpu"), 60)
    sender.connect()
    sender.send([torch.tensor([1.0]), torch.tensor([2.0])])
    sender.destroy()
    assert sender.init_info["world_size"] == 3
    assert calls == [
        (bytes(range(128)), 0, 3), "wait", ("broadcast", [1.0], 0), ("broadcast", [2.0], 0), "synchronize", "destroy",
    ]  # fmt: skip


def test_a_worker_that_never_joins_a_nccl_group_ends_the_wait_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    came, ended = threading.Event(), threading.Event()

    def join(*_: Any) -> SimpleNamespace:
        came.wait()
        return SimpleNamespace(destroy=ended.set)

    library = SimpleNamespace(ncclGetUniqueId=lambda: SimpleNamespace(internal=[0] * 128))
    wrapper, common = SimpleNamespace(NCCLLibrary=lambda: library), SimpleNamespace(uid_init_process_group=join)
    monkeypatch.setitem(sys.modules, "vllm.distributed.device_communicators.pynccl_wrapper", wrapper)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_common", common)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    sender = NcclGroup(2, torch.device("cpu"), 0.05)
    with pytest.raises(TimeoutError, match=r"not all of 2 workers joined the NCCL group in 0.05 s"):
        sender.connect()
    came.set()  # too late: nobody wants the group any more
    assert ended.wait(60)
