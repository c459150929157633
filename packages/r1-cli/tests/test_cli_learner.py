"""What a run's learner is given: weights and reference in their precisions, and a learning rate."""

from typing import Any, cast

import pytest
import torch

from r1_cli.assembly import learner as assembly
from r1_cli.assembly.learner import build_learner, build_learning_rate
from r1_cli.config import load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs.train import build_schedule
from r1_cli.plan.batches import make_plan

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
    schedule = build_schedule(config, make_plan(config, [80], None))
    assert schedule.updates_per_step == 4
    scale = build_learning_rate(config, schedule)
    expected = [min(1, (update + 1) / max(updates, 1)) for update in range(40)]
    assert [scale(update) for update in range(40)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("hardware", "words", "policy", "reference"),
    [
        (Hardware("cpu"), [], (torch.float32, torch.float32), torch.float32),
        (Hardware("cuda", ("0",)), [], (torch.float32, torch.bfloat16), torch.bfloat16),
        (Hardware("cuda", ("0",)), ["mp_param_dtype=fp32"], (torch.float32, torch.float32), torch.float32),
        (Hardware("cuda", ("0",)), ["torch_dtype=bf16"], (torch.bfloat16, torch.bfloat16), torch.bfloat16),
    ],
)
def test_the_reference_is_kept_in_the_precision_that_it_computes_in(
    hardware: Hardware,
    words: list[str],
    policy: tuple[torch.dtype, torch.dtype],
    reference: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = []

    def load(config: Any, model: Any, dtype: torch.dtype, device: Any, computing: Any, parallel: Any) -> Any:
        loaded.append((dtype, computing))
        return torch.nn.Linear(2, 2, dtype=dtype)

    monkeypatch.setattr(assembly, "load_weights", load)
    more = [f"worker.actor.fsdp.{word}" for word in words] + ["worker.actor.model.enable_gradient_checkpointing=false"]
    config = load_config([*BASE, *more])[0]
    build_learner(config, hardware, cast(Any, None), build_schedule(config, make_plan(config, [80], None)))
    assert loaded == [policy, (reference, reference)]
