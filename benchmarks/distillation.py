"""Distillation on policy against GRPO: sampled tokens until a student is as good as 95 % of its teacher.

uv run python benchmarks/distillation.py FOLDER [--seeds 1 2 3] [--sharper]

For each seed, GRPO trains the quickstart's model for 50 steps: the teacher. Students begin where GRPO began, answer
each prompt once, and get no reward. Controls: a teacher that is the student's own start, and GRPO with as few answers
a step. Validation is
on the quickstart's 324 rows, four answers each. Prints a table; runs that FOLDER has already are not repeated.

With `--sharper`, the teacher is the student's own start and sees pictures of 112 × 112 pixels, the student of 56 × 56.
For each seed, `r1 sft` first teaches the quickstart's model 1,000 pictures of 112 × 112. Controls: a teacher that sees
the student's pictures, and one that sees the next row's at 112 × 112. The bar, in every seed: the student gains 0.10
over its start and ends 0.10 above both controls, and neither control gains 0.04 (two standard errors of a difference).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CONFIG, MODEL = "examples/quickstart/config.yaml", "examples/quickstart/model"
TRAIN = "examples/quickstart/train.parquet"
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
LESSONS, SFT_STEPS, SHARPER_STEPS = 1000, 60, 40
SMALL, SHARP = 56 * 56, 112 * 112  # pixels
SHARPER = [
    "worker.rollout.n=1",
    "data.rollout_batch_size=96",
    "worker.actor.global_batch_size=96",
    "worker.actor.optim.lr=3e-4",
    "worker.teacher.model.model_path=policy",
    "algorithm.distillation.sync=never",
    f"data.max_pixels={SMALL}",
    f"trainer.max_steps={SHARPER_STEPS}",
    "trainer.val_freq=20",
    "trainer.save_freq=-1",
]
ACCURACY, LENGTH = "val/accuracy_reward", "response_length/mean"


@dataclass(frozen=True)
class Curve:
    tokens: list[float]  # sampled until each validation
    accuracy: list[float]
    seconds: float

    def tokens_until(self, accuracy: float) -> float | None:
        return next((n for n, value in zip(self.tokens, self.accuracy, strict=True) if value >= accuracy), None)


def train(folder: Path, words: Sequence[str], start: Sequence[str] = ("train", CONFIG)) -> None:
    if (folder / "done").exists():
        return
    command = [sys.executable, "-m", "r1_cli.main", *start, *ALIKE, *words]
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


def write_pictures(folder: Path) -> None:
    """Write conversations with right answers, and rows of training, whose column `other` has the next row's picture."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(TRAIN)
    lessons = table.slice(0, LESSONS)
    answers = [f"<think>{'*' * int(n)}</think>\\boxed{{{n}}}" for n in lessons["answer"].to_pylist()]
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(lessons["problem"].to_pylist(), answers, strict=True)
    ]
    columns = {"images": lessons["images"], "messages": pa.array(messages)}
    pq.write_table(pa.table(columns), folder / "lessons.parquet")
    rows = table.slice(LESSONS)
    images = rows["images"].combine_chunks()
    shifted = pa.concat_arrays([images.slice(1), images.slice(0, 1)])
    pq.write_table(rows.append_column("other", shifted), folder / "rows.parquet")


def run_sharper(folder: Path, seed: int) -> tuple[float, dict[str, Curve]]:
    """Return the start's accuracy at 112 × 112, and the curves of runs at 56 × 56."""
    start, seeds = folder / f"start-{seed}", [f"data.seed={seed}", f"worker.rollout.seed={seed}"]
    words = [f"data.train_files={folder}/lessons.parquet", f"trainer.max_steps={SFT_STEPS}"]
    words += [f"trainer.val_freq={SFT_STEPS}", f"trainer.save_freq={SFT_STEPS}", "sft.epochs=4"]
    train(start, [*seeds, *words], ("sft", "benchmarks/cold_start.yaml"))
    kinds = {
        "112 × 112": [f"worker.teacher.max_pixels={SHARP}"],
        "control: 56 × 56": [f"worker.teacher.max_pixels={SMALL}"],
        "control: another row's, 112 × 112": [f"worker.teacher.max_pixels={SHARP}", "worker.teacher.image_key=other"],
    }
    model = f"worker.actor.model.model_path={start}/global_step_{SFT_STEPS}/actor"
    curves = {}
    for (kind, words), name in zip(kinds.items(), ("sharper", "same", "other"), strict=True):
        run = folder / f"{name}-{seed}"
        train(run, [*seeds, *SHARPER, model, f"data.train_files={folder}/rows.parquet", *words])
        curves[kind] = read_curve(run, 96)
    return read_curve(start, 0).accuracy[-1], curves


def print_sharper(folder: Path, seeds: Sequence[int]) -> None:
    write_pictures(folder)
    print("| seed | teacher sees | teacher's accuracy | student at the start | after 20 steps | after 40 | gain |")
    print("|---|---|---|---|---|---|---|")
    for seed in seeds:
        sharp, curves = run_sharper(folder, seed)
        for kind, curve in curves.items():
            first, middle, last = curve.accuracy
            teacher = sharp if kind == "112 × 112" else first if "56" in kind else None
            shown = "" if teacher is None else f"{teacher:.3f}"
            print(
                f"| {seed} | {kind} | {shown} | {first:.3f} | {middle:.3f} | {last:.3f} | {last - first:+.3f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--sharper", action="store_true", help="a teacher that sees sharper pictures, and its controls")
    arguments = parser.parse_args()
    if arguments.sharper:
        print_sharper(arguments.folder, arguments.seeds)
        return
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
