"""What a run's learner is given: weights and reference in their precisions, and a learning rate."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from r1_cli.build import learner as assembly
from r1_cli.build.algorithm import build_schedule
from r1_cli.build.learner import build_learner, build_learning_rate, build_offload, build_shards, single_rank
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.plan.batches import make_plan
from r1_core.learner.offload import Offload
from r1_core.learner.parallel import Parallel, Shard, shard_model

BASE = [
    "data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model", "trainer.n_gpus_per_node=1",
    "worker.reward.reward_function=math", "data.rollout_batch_size=8", "worker.actor.global_batch_size=4",
    "worker.actor.ppo_epochs=2", "trainer.max_steps=10",
]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "updates"), [("lr_warmup_steps=3", 12), ("lr_warmup_ratio=0.5", 20), ("lr_warmup_steps=0", 0)]
)
def test_a_warm_up_is_as_many_training_steps_long_as_it_says(word: str, updates: int) -> None:
    config = load_config([*BASE, f"worker.actor.optim.{word}"])[0]
    schedule = build_schedule(config, make_plan(config, [80], None).total_steps or 0)
    assert schedule.updates_per_step == 4
    scale = build_learning_rate(config.worker.actor.optim, schedule.total_steps, schedule.updates_per_step)
    expected = [min(1, (update + 1) / max(updates, 1)) for update in range(40)]
    assert [scale(update) for update in range(40)] == pytest.approx(expected)


@pytest.fixture
def one_rank() -> Iterator[Parallel]:
    """The mesh that a single device has, of processors."""
    yield Parallel.single_process("cpu")
    dist.destroy_process_group()


GPU = Hardware("cuda", ("0",))
HALF, SINGLE = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("hardware", "words", "kept", "computing"),
    [
        (Hardware("cpu"), [], SINGLE, SINGLE),
        (GPU, [], SINGLE, HALF),
        (GPU, ["mp_param_dtype=fp32"], SINGLE, SINGLE),
        (GPU, ["torch_dtype=bf16"], HALF, HALF),
        (GPU, ["enable_cpu_offload=true", "enable_full_shard=false"], SINGLE, HALF),
    ],
)
def test_weights_are_kept_in_one_precision_and_computed_with_in_another(
    hardware: Hardware,
    words: list[str],
    kept: torch.dtype,
    computing: torch.dtype,
    one_rank: Parallel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []

    def load(
        config: Any,
        model: Any,
        dtype: torch.dtype,
        device: Any,
        parallel: Parallel,
        shard: Shard,
        adapters: None = None,
    ) -> Any:
        loaded.append(dtype)
        linear = torch.nn.Linear(2, 2, dtype=dtype)
        if parallel.mesh is not None:
            shard_model(linear, [], parallel.mesh, replace(shard, offload=False))
        return linear

    monkeypatch.setattr(assembly, "load_weights", load)
    more = [f"worker.actor.fsdp.{word}" for word in words] + ["worker.actor.model.enable_gradient_checkpointing=false"]
    config = load_config([*BASE, *more])[0]
    schedule = build_schedule(config, make_plan(config, [80], None).total_steps or 0)
    learner = build_learner(config, hardware, cast(Any, None), schedule, one_rank)
    # The reference, which nobody trains, needs no more digits than it computes with.
    assert loaded == [kept, computing]
    assert learner.reference is not None
    for model, dtype in ((learner.model, kept), (learner.reference, computing)):
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        assert model(torch.ones(1, 2)).dtype == computing
    learner.model(torch.ones(1, 2)).sum().backward()
    assert {parameter.grad.dtype for parameter in learner.model.parameters() if parameter.grad is not None} == {kept}


def test_processors_alone_need_no_process_group() -> None:
    with single_rank(Hardware("cpu")) as parallel:
        assert parallel.mesh is None
        assert not dist.is_initialized()


def test_precision_and_offload_of_a_gpu_are_the_configurations() -> None:
    words = ["worker.actor.fsdp.mp_reduce_dtype=bf16", "worker.actor.fsdp.enable_full_shard=false"]
    policy, reference = build_shards(load_config([*BASE, *words])[0], GPU)
    assert policy == Shard(HALF, HALF, reshard=False, offload=False)
    assert reference == Shard(HALF, HALF, reshard=True, offload=True)  # worker.ref.fsdp's own defaults
    assert not any(shard.offload for shard in build_shards(load_config(BASE)[0], Hardware("cpu")))


OFF = "worker.actor.offload.offload_params=false"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Offload(weights=True, optimizer=True)),
        ([OFF], Offload(optimizer=True)),
        (["worker.actor.offload.offload_optimizer=false"], Offload(weights=True)),
        (["worker.actor.fsdp.enable_cpu_offload=true"], Offload()),  # it is with the processor anyhow
        (["worker.rollout.servers.urls=[http://a:8000]"], Offload()),  # nobody wants the room
        (["worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node=1"], Offload()),
        (
            [
                "trainer.n_gpus_per_node=2",
                "worker.rollout.engines.nnodes=1",
                "worker.rollout.engines.n_gpus_per_node=1",
            ],
            Offload(),
        ),
        (
            ["worker.ref.fsdp.enable_cpu_offload=false", "worker.ref.offload.offload_params=true", OFF],
            Offload(optimizer=True, reference=True),
        ),
    ],
)
def test_states_leave_a_gpu_where_an_engine_wants_the_room(
    words: list[str], expected: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")
    config = load_config([*BASE, *words])[0]
    assert build_offload(config, GPU) == expected
    assert build_offload(config, Hardware("cpu")) == Offload()
