"""Weights that ranks send to engines past the driver: all of them arrive, in the order that leaves each the room."""

from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
from cli_delivery import delivered

from r1_cli.cluster.direct import DirectBackend, EngineWorkers, find_backend
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_rollout.weights import TransferCall

BASE = ["data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model", "trainer.n_gpus_per_node=2"]
GPUS = Hardware("cuda", ("0", "1"))
JOIN, START, UPDATE, FINISH = (
    "init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_ranks_send_engines_their_weights_and_rest_before_these_make_room_to_sample(dtype: torch.dtype | None) -> None:
    order, _ = ranks.run(delivered, dtype)
    verbs = [JOIN, START, UPDATE, FINISH, "rest", "active", "sampling"]
    assert [*dict.fromkeys(order)] == verbs  # no tensor's name: none of an engine's differs
    assert order.count(JOIN) == 2  # each engine joins once, for both syncs
    assert order.count("rest") == 2
    again = order[order.index("sampling") + 1 :]
    assert again[:2] == [START, START]
    assert again.index("rest") < again.index("active")
    assert order.count(UPDATE) > 8  # in buckets


def test_an_engine_that_refuses_is_named_when_the_ranks_have_ended_their_pass_and_may_try_again() -> None:
    order, _ = ranks.run(delivered, None, "model.layers.1.mlp.up_proj.weight")
    assert order[0] == "no room for model.layers.1.mlp.up_proj.weight"
    assert order.count(JOIN) == 4  # a new group after the failure
    assert order[-1] == "sampling"
    assert order.count("sampling") == 1


def test_workers_of_several_engines_have_ranks_of_their_own_in_the_group() -> None:
    asked: list[tuple[int, TransferCall]] = []
    hosts = [lambda verb, call, number=number: asked.append((number, call)) for number in range(3)]
    EngineWorkers(hosts, 2).init_weight_transfer_engine({"rank_offset": 1, "world_size": 7})
    offsets = {number: call.request["init_info"]["rank_offset"] for number, call in asked}
    assert offsets == {0: 1, 1: 3, 2: 5}
    EngineWorkers(hosts, 2).init_weight_transfer_engine({"packed": True})
    assert all(call.request == {"init_info": {"packed": True}} for _, call in asked[3:])


def test_the_first_engine_that_fails_is_heard_though_another_never_answers() -> None:
    import threading

    released = threading.Event()

    def fails(verb: str, call: TransferCall) -> None:
        raise ValueError("this one fails")

    try:
        with pytest.raises(ValueError, match="this one fails"):
            EngineWorkers([lambda verb, call: released.wait(60), fails], 1).start_weight_update()
    finally:
        released.set()


@pytest.mark.parametrize(
    ("words", "hardware", "engine", "way"),  # of two ranks, but for the last
    [
        ([], GPUS, "vllm", DirectBackend("ipc", 2)),
        (
            ["worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node=2"],
            GPUS,
            "vllm",
            DirectBackend("nccl", 2),
        ),
        ([], GPUS, "embedded", None),
        ([], Hardware("cpu"), "vllm", None),
        (["trainer.n_gpus_per_node=1"], GPUS, "vllm", None),
    ],
)
def test_weights_go_past_the_driver_from_gpus_to_vllm(
    words: list[str], hardware: Hardware, engine: str, way: DirectBackend | None
) -> None:
    config = load_config([*BASE, "worker.reward.reward_function=math", f"worker.rollout.name={engine}", *words])[0]
    assert find_backend(config, hardware, 2) == way


@pytest.mark.parametrize(("value", "warned"), [("expandable_segments:True", True), ("max_split_size_mb:64", False)])
def test_an_allocator_that_shares_by_descriptors_is_warned_of(
    value: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", value)
    config, _ = load_config([*BASE, "worker.reward.reward_function=math", "worker.rollout.name=vllm"])
    assert find_backend(config, GPUS, 2) == DirectBackend("ipc", 2)
    assert ("many containers forbid" in caplog.text) == warned


class Recorder:
    """The engines of an IPC transfer; the second update fails if it is to."""

    def __init__(self, fails: bool) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._fails = fails

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append((JOIN, init_info))

    def start_weight_update(self) -> None:
        self.calls.append((START, None))

    def update_weights(self, update_info: Any) -> None:
        self.calls.append((UPDATE, update_info))
        if self._fails and len(self.calls) == 4:
            raise ValueError("out of memory")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append((FINISH, None))


@pytest.mark.parametrize("fails", [False, True])
def test_vllms_own_sender_over_ipc_calls_the_engines_and_ends_its_pass_whatever_they_say(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device alone is a double: one buffer on processors, whose handle is its number of bytes."""
    ipc = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    from vllm.distributed.weight_transfer import packed_tensor

    from r1_rollout.transports.direct import IpcSender

    empty = torch.empty
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu-0"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: empty(*size, **more))
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, (len(tensor),)))
    monkeypatch.setattr(ipc, "reduce_tensor", lambda tensor: (None, (len(tensor),)))
    monkeypatch.setattr("r1_rollout.transports.direct.BUCKET", 100)
    engines, passes = Recorder(fails), []

    def weights() -> Any:
        passes.append("begun")
        yield from ((name, torch.ones(10)) for name in "abcde")
        passes.append("ended")

    sender = IpcSender(engines, 0, weights, largest=40)
    if fails:
        with pytest.raises(ValueError, match="out of memory"):
            sender.send()
        assert [verb for verb, _ in engines.calls] == [JOIN, START, UPDATE, UPDATE]
    else:
        sender.send()
        sender.send()
        one = [START, UPDATE, UPDATE, UPDATE, FINISH]
        assert [verb for verb, _ in engines.calls] == [JOIN, *one, *one]
        infos = [info for verb, info in engines.calls[:6] if verb == UPDATE]
        assert [info["names"] for info in infos] == [["a", "b"], ["c", "d"], ["e"]]
        assert infos[0]["ipc_handles"] == {"gpu-0": (100,)}
        assert engines.calls[0][1] == {"packed": True}
    assert passes == ["begun", "ended"] * (1 if fails else 2)
