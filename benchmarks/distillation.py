"""Distillation on policy against GRPO: sampled tokens until a student is as good as 95 % of its teacher.

uv run python benchmarks/distillation.py FOLDER [--seeds 1 2 3]

For each seed, GRPO trains the quickstart's model for 50 steps: the teacher. Students begin where GRPO began, answer
each prompt once, and get no reward. Controls: a teacher that is the student's own start, and GRPO with as few answers
a step. Validation is
on the quickstart's 324 rows, four answers each. Prints a table; runs that FOLDER has already are not repeated.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CONFIG, MODEL = "examples/quickstart/config.yaml", "examples/quickstart/model"
TEACHER_STEPS, STUDENT_STEPS, ANSWERS = 50, 24, 48
ALIKE = [
    "worker.actor.optim.lr_scheduler_type=constant",
    "worker.rollout.val_override_config.n=4",
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
    "data.filter_overlong_prompts_workers=1",
    "trainer.logger=[file]",
    "trainer.record_gb=0",
]
STUDENT = [
    "worker.rollout.n=1",
    f"data.rollout_batch_size={ANSWERS}",
    f"worker.actor.global_batch_size={ANSWERS}",
    f"trainer.max_steps={STUDENT_STEPS}",
    "trainer.val_freq=2",
    "trainer.save_freq=-1",
]
SHARE = 0.95  # of the teacher's accuracy
ACCURACY, LENGTH = "val/accuracy_reward", "response_length/mean"


@dataclass(frozen=True)
class Curve:
    tokens: list[float]  # sampled until each validation
    accuracy: list[float]
    seconds: float

    def tokens_until(self, accuracy: float) -> float | None:
        return next((n for n, value in zip(self.tokens, self.accuracy, strict=True) if value >= accuracy), None)


def train(folder: Path, words: Sequence[str]) -> None:
    if (folder / "done").exists():
        return
    command = [sys.executable, "-m", "r1_cli.main", "train", CONFIG, *ALIKE, *words]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.txt").open("w") as log:
        subprocess.run([*command, f"trainer.save_checkpoint_path={folder}"], check=True, stdout=log, stderr=log)
    (folder / "done").touch()


def read_curve(folder: Path, answers: int) -> Curve:
    """Return a run's curve; `answers` are those of a step."""
    tokens, at, accuracy, seconds = 0.0, list[float](), list[float](), 0.0
    for line in (folder / "experiment_log.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens += answers * record.get(LENGTH, 0.0)
        seconds += record.get("perf/time_per_step", 0.0)
        if ACCURACY in record:
            at.append(tokens)
            accuracy.append(record[ACCURACY])
    return Curve(at, accuracy, seconds)


def run_seed(folder: Path, seed: int) -> dict[str, Curve]:
    grpo, seeds = folder / f"grpo-{seed}", [f"data.seed={seed}", f"worker.rollout.seed={seed}"]
    steps = [f"trainer.max_steps={TEACHER_STEPS}", "trainer.val_freq=2", f"trainer.save_freq={TEACHER_STEPS}"]
    train(grpo, [*seeds, *steps])
    teacher = f"worker.teacher.model.model_path={grpo}/global_step_{TEACHER_STEPS}/actor"
    kinds = {
        "loss": [teacher, "algorithm.distillation.form=loss"],
        "advantage": [teacher, "algorithm.distillation.form=advantage"],
        "control": [f"worker.teacher.model.model_path={MODEL}", "algorithm.distillation.form=loss"],
    }
    curves = {"GRPO, the teacher": read_curve(grpo, 16 * 8)}
    for kind, words in kinds.items():
        run = folder / f"{kind}-{seed}"
        train(run, [*seeds, *STUDENT, *words])
        curves[kind] = read_curve(run, ANSWERS)
    small = folder / f"small-{seed}"
    steps = [f"trainer.max_steps={3 * TEACHER_STEPS}", "trainer.val_freq=4", "trainer.save_freq=-1"]
    steps.append("worker.actor.micro_batch_size_per_device_for_update=16")
    train(
        small,
        [*seeds, *steps, f"data.rollout_batch_size={ANSWERS // 8}", f"worker.actor.global_batch_size={ANSWERS // 8}"],
    )
    curves["GRPO in small steps"] = read_curve(small, ANSWERS)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments = parser.parse_args()
    print(
        "| seed | run | accuracy at the start | best | at the end "
        "| sampled tokens until 95 % of the teacher | × GRPO's | seconds |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        curves = run_seed(arguments.folder, seed)
        grpo = curves["GRPO, the teacher"]
        bar = SHARE * grpo.accuracy[-1]
        whole = grpo.tokens_until(bar)
        for kind, curve in curves.items():
            needed = curve.tokens_until(bar)
            shown = "never" if needed is None else f"{needed:,.0f}"
            share = "" if needed is None or not whole else f"{needed / whole:.2f}"
            first, best, last = curve.accuracy[0], max(curve.accuracy), curve.accuracy[-1]
            cells = f"{first:.3f} | {best:.3f} | {last:.3f} | {shown} | {share} | {curve.seconds:.0f}"
            print(f"| {seed} | {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
