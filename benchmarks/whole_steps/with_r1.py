"""`r1 train` as a user types it, stopped between steps. It imports no other module of r1, of whichever checkout."""

import tempfile
from dataclasses import replace
from typing import Any

from whole_steps.gate import Gate
from whole_steps.task import ANSWERS, QUICKSTART, Task

# What the page calls a phase, and the stages of a step that it is made of; the rest is the rest.
PHASES = {
    "sampling": ("gen",),
    "rewards": ("reward",),
    "update": ("old", "ref", "adv", "update_actor"),
    "hand-over": ("sync",),
}


def serve_task(task: Task, micro: str) -> None:
    """Train on a task."""
    if task.kind == "tailed":
        end_at(task.lengths or [])
    with tempfile.TemporaryDirectory() as folder:
        words = [
            f"data.train_files={task.rows}", "data.val_files=null", f"data.rollout_batch_size={task.prompts}",
            f"data.max_prompt_length={task.prompt_tokens}", f"data.max_response_length={task.tokens}",
            f"worker.actor.global_batch_size={task.prompts}", f"worker.actor.model.model_path={task.model}",
            f"worker.actor.micro_batch_size_per_device_for_update={micro}",
            f"worker.actor.optim.lr={task.rate}", "worker.actor.optim.lr_scheduler_type=constant",
            f"worker.rollout.n={ANSWERS}", f"worker.rollout.ignore_eos={'false' if task.lengths is None else 'true'}",
            f"worker.reward.reward_function={task.reward}:compute_score", "worker.rollout.name=embedded",
            "trainer.max_steps=100000", "trainer.total_epochs=100000", "trainer.val_freq=-1", "trainer.save_freq=-1",
            "trainer.val_before_train=false", "trainer.logger=[file]", "trainer.max_idle_steps=-1",
            f"trainer.save_checkpoint_path={folder}",
        ]  # fmt: skip
        serve([str(QUICKSTART / "config.yaml"), *words])


def serve_quickstart() -> None:
    """Train the quickstart as it is, validations and checkpoints included."""
    with tempfile.TemporaryDirectory() as folder:
        serve(["examples/quickstart/config.yaml", "trainer.logger=[file]", f"trainer.save_checkpoint_path={folder}"])


def serve(words: list[str]) -> None:
    """Run `r1 train` with these words, a step whenever the gate lets one pass."""
    gate = Gate()
    from r1_cli.main import main
    from r1_cli.train import loop
    from r1_cli.train import run as around

    take, finish = loop.take_step, around.finish_step

    def take_step(*args: Any) -> Any:
        gate.open()
        return take(*args)

    def finish_step(run: Any, taken: Any, *others: Any) -> None:
        # Earlier checkouts hand over the position and the record, later ones one object with both.
        at, record = (taken, others[0]) if others else (taken.at, taken.metrics)
        validates, saves = run.schedule.validates(at.step), run.schedule.saves(at.step)
        finish(run, taken, *others)
        phases = {
            name: sum(record.get(f"timing_s/{stage}", 0.0) for stage in stages) for name, stages in PHASES.items()
        }
        facts = {"tokens": record.get("response_length/mean"), "reward": record.get("reward/overall")}
        found = {name: value for name, value in record.items() if name.startswith("val/")}
        gate.passed(phases=phases, plain=not (validates or saves), step=at.step, found=found, **facts)

    loop.take_step, around.finish_step = take_step, finish_step
    main(["train", *words], standalone_mode=False)


def end_at(lengths: list[list[int]]) -> None:
    """Let each sample end at its own length, by the engine's own plan for the rest."""
    import torch

    from r1_rollout.embedded import engine

    plan = engine.sampling_strategy

    def scheduled(*args: Any, **options: Any) -> Any:
        def stopped(rows: Any) -> torch.Tensor:
            return rows.ages >= torch.tensor([lengths[request.key][sample] for request, sample in rows.owners])

        return replace(plan(*args, **options), stopped=stopped)

    engine.sampling_strategy = scheduled
