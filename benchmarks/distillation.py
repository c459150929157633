"""Distillation on policy against GRPO: sampled tokens until a student is as good as 95 % of its teacher.

uv run python benchmarks/distillation.py FOLDER [--seeds 1 2 3] [--sharper | --hint | --cost]

For each seed, GRPO trains the quickstart's model for 50 steps: the teacher. Students begin where GRPO began, answer
each prompt once, and get no reward. Controls: a teacher that is the student's own start, and GRPO with as few answers
a step. Validation is
on the quickstart's 324 rows, four answers each. Prints a table; runs that FOLDER has already are not repeated.

With `--sharper`, the teacher is the student's own start and sees pictures of 112 × 112 pixels, the student of 56 × 56.
For each seed, `r1 sft` first teaches the quickstart's model 1,000 pictures of 112 × 112. Controls: a teacher that sees
the student's pictures, and one that sees the next row's at 112 × 112. The bar, in every seed: the student gains 0.10
over its start and ends 0.10 above both controls, and neither control gains 0.04 (two standard errors of a difference).

With `--hint`, the teacher is the student's own start and is told the answer behind the question. For each seed,
`r1 sft` first teaches the quickstart's model to copy it from 1,000 such questions. Controls: a teacher that is told the
next row's answer, and one with the student's prompts and its weights of up to 20 steps before. The bar is that of
`--sharper`; the first control misses it, because its teacher sees the picture (`hints.py`).

With `--cost`, the processor time of what each form adds to a step, as multiples of the update of GRPO's loss, measured
in turn: medians of five rounds, of a random model whose teacher is as large.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time

import pyarrow as pa
import pyarrow.parquet as pq

CONFIG, MODEL = "examples/quickstart/config.yaml", "examples/quickstart/model"
TRAIN, VALIDATION = "examples/quickstart/train.parquet", "examples/quickstart/val.parquet"
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
OWN_START = [
    "worker.rollout.n=1",
    "data.rollout_batch_size=96",
    "worker.actor.global_batch_size=96",
    "worker.actor.optim.lr=3e-4",
    "worker.teacher.model.model_path=policy",
    f"trainer.max_steps={SHARPER_STEPS}",
    "trainer.val_freq=20",
    "trainer.save_freq=-1",
]
VOCABULARY, PROMPT, ANSWER, SEQUENCES, TOP, ROUNDS = 16_384, 32, 32, 16, 32, 5
PLAIN = "the update of GRPO's loss"
HINT = "{{ content }} The answer is {{ COLUMN }}."
ACCURACY, LENGTH = "val/accuracy_reward", "response_length/mean"
LONGER = ["data.max_length=104", "data.max_prompt_length=84"]  # tokens, with a hint


@dataclass(frozen=True)
class Curve:
    tokens: list[float]  # sampled until each validation
    accuracy: list[float]
    seconds: float

    def tokens_until(self, accuracy: float) -> float | None:
        return next((n for n, value in zip(self.tokens, self.accuracy, strict=True) if value >= accuracy), None)


Curves = dict[str, Curve]  # by what the teacher sees
RunSeed = Callable[[Path, int], tuple[dict[str, float], Curves]]


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


def write_rows(folder: Path, *, hinted: bool) -> None:
    """Write conversations with right answers, and rows of training with the picture and the answer of the next row."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pq.read_table(TRAIN)
    lessons, rows = table.slice(0, LESSONS), table.slice(LESSONS)
    hint = HINT if hinted else "{{ content }}"
    messages = [
        [
            {"role": "user", "content": hint.replace("{{ content }}", question).replace("{{ COLUMN }}", number)},
            {"role": "assistant", "content": f"<think>{'*' * int(number)}</think>\\boxed{{{number}}}"},
        ]
        for question, number in zip(lessons["problem"].to_pylist(), lessons["answer"].to_pylist(), strict=True)
    ]
    pq.write_table(pa.table({"images": lessons["images"], "messages": pa.array(messages)}), folder / "lessons.parquet")
    for column, name in (("images", "other"), ("answer", "other_answer")):
        cells = rows[column].combine_chunks()
        rows = rows.append_column(name, pa.concat_arrays([cells.slice(1), cells.slice(0, 1)]))
    pq.write_table(rows, folder / "rows.parquet")
    for column in ("answer", "other_answer"):
        (folder / f"{column}.jinja").write_text(HINT.replace("COLUMN", column))


def fine_tune(folder: Path, seed: int, words: Sequence[str]) -> tuple[Path, list[str]]:
    """Return the run that teaches the start of a seed, and the settings of a student that begins there."""
    start, seeds = folder / f"start-{seed}", [f"data.seed={seed}", f"worker.rollout.seed={seed}"]
    steps = [f"trainer.max_steps={SFT_STEPS}", f"trainer.val_freq={SFT_STEPS}", f"trainer.save_freq={SFT_STEPS}"]
    lessons = [f"data.train_files={folder}/lessons.parquet", "sft.epochs=4"]
    train(start, [*seeds, *lessons, *steps, *words], ("sft", "benchmarks/cold_start.yaml"))
    model = f"worker.actor.model.model_path={start}/global_step_{SFT_STEPS}/actor"
    return start, [*seeds, *OWN_START, model, f"data.train_files={folder}/rows.parquet"]


def run_students(folder: Path, seed: int, words: Sequence[str], kinds: dict[str, tuple[str, list[str]]]) -> Curves:
    curves = {}
    for kind, (name, own) in kinds.items():
        run = folder / f"{name}-{seed}"
        train(run, [*words, *own])
        curves[kind] = read_curve(run, 96)
    return curves


def run_sharper(folder: Path, seed: int) -> tuple[dict[str, float], Curves]:
    """Return the accuracies of teachers, where they are known, and the curves of students."""
    start, words = fine_tune(folder, seed, [])
    sharp, never = f"worker.teacher.max_pixels={SHARP}", "algorithm.distillation.sync=never"
    kinds = {
        "112 × 112": ("sharper", [sharp]),
        "control: 56 × 56": ("same", [f"worker.teacher.max_pixels={SMALL}"]),
        "control: another row's, 112 × 112": ("other", [sharp, "worker.teacher.image_key=other"]),
    }
    curves = run_students(folder, seed, [*words, never, f"data.max_pixels={SMALL}"], kinds)
    small = "control: 56 × 56"
    return {"112 × 112": read_curve(start, 0).accuracy[-1], small: curves[small].accuracy[0]}, curves


def run_hint(folder: Path, seed: int) -> tuple[dict[str, float], Curves]:
    hint = {"format_prompt": f"{folder}/answer.jinja", "prompt_key": "problem", "answer_key": "answer"}
    sources = json.dumps([{"files": VALIDATION, **hint}])
    start, words = fine_tune(folder, seed, [f"data.val_sources={sources}", *LONGER])
    never = "algorithm.distillation.sync=never"
    kinds = {
        "the answer": ("hint", [never, f"worker.teacher.context={folder}/answer.jinja"]),
        "control: another row's answer": ("other", [never, f"worker.teacher.context={folder}/other_answer.jinja"]),
        "control: no hint": ("none", ["algorithm.distillation.sync=20"]),
    }
    return {"the answer": read_curve(start, 0).accuracy[-1]}, run_students(folder, seed, words, kinds)


def print_privileged(folder: Path, seeds: Sequence[int], run: RunSeed, *, hinted: bool) -> None:
    write_rows(folder, hinted=hinted)
    print("| seed | teacher sees | teacher's accuracy | student at the start | after 20 steps | after 40 | gain |")
    print("|---|---|---|---|---|---|---|")
    for seed in seeds:
        teachers, curves = run(folder, seed)
        for kind, curve in curves.items():
            first, middle, last = curve.accuracy
            shown = f"{teachers[kind]:.3f}" if kind in teachers else ""
            print(
                f"| {seed} | {kind} | {shown} | {first:.3f} | {middle:.3f} | {last:.3f} | {last - first:+.3f} |",
                flush=True,
            )


def measure_costs() -> dict[str, float]:
    """Return the median processor time of each part of a step, as a multiple of the update without a teacher."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from r1_core.learner import Learner
    from r1_core.learner.batching import Batching, MicroLimit
    from r1_core.losses.ppo import PPOClip
    from r1_core.objective import Objective
    from r1_core.types import Sample

    torch.set_num_threads(1)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4}
    settings = Qwen2Config(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, attn_implementation="sdpa")
    policy, teacher = (Qwen2ForCausalLM(settings) for _ in range(2))
    limit = MicroLimit(16)
    learner = Learner(
        policy, torch.optim.SGD(policy.parameters(), lr=0.0), lambda step: 1.0, teacher=teacher, teacher_top=TOP,
        batching=Batching(update=limit, experience=limit),
    )  # fmt: skip
    length = torch.arange(PROMPT + ANSWER)
    samples = [
        Sample(
            torch.randint(VOCABULARY, length.shape), length >= PROMPT, length[None], i, 0.0, advantages=0.0 * length + 1
        )
        for i in range(SEQUENCES)
    ]
    samples = learner.add_logprobs(learner.add_logprobs(samples, ["old_logprobs"]), ["teacher_top"])
    parts: dict[str, Callable[[], object]] = {
        PLAIN: lambda: learner.forward_backward(samples, Objective(PPOClip())),
        "`advantage`: the teacher's log-probs": lambda: learner.add_logprobs(samples, ["teacher_logprobs"]),
        f"`topk: {TOP}`: the teacher's likely tokens": lambda: learner.add_logprobs(samples, ["teacher_top"]),
        f"`topk: {TOP}`: the update": lambda: learner.forward_backward(samples, Objective(divergence="top")),
        "`loss`: the update, with the teacher's pass": lambda: learner.forward_backward(
            samples, Objective(divergence="reverse_kl")
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(1 + ROUNDS):
        for name, part in parts.items():
            begun = process_time()
            part()
            times[name].append(process_time() - begun)
    found = {name: median(of_part[1:]) for name, of_part in times.items()}
    return {name: seconds / found[PLAIN] for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--sharper", action="store_true", help="a teacher that sees sharper pictures, and its controls")
    kinds.add_argument("--hint", action="store_true", help="a teacher that is told the answer, and its controls")
    kinds.add_argument("--cost", action="store_true", help="the processor time of each form")
    arguments = parser.parse_args()
    if arguments.cost:
        print("| part of a step | processor time |\n|---|---|")
        for name, times in measure_costs().items():
            print(f"| {name} | {times:.2f} × |")
        return
    if arguments.sharper or arguments.hint:
        run = run_hint if arguments.hint else run_sharper
        print_privileged(arguments.folder, arguments.seeds, run, hinted=arguments.hint)
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
