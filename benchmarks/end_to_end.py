"""Whole GRPO steps: `r1 train` against TRL's GRPOTrainer, and the quickstart against what it was in another checkout.

uv run --isolated --group trl python benchmarks/end_to_end.py [--task fixed|tailed|pictures] [--rounds 4]
uv run python benchmarks/end_to_end.py --against ../a-checkout-of-b6c1d26
uv run python benchmarks/end_to_end.py --sizes [--task fixed|tailed|pictures] [--rounds 4]

Against TRL: the same model, rows, reward, lengths, AdamW and learning rate, float32, one optimizer step a step, as many
threads. `fixed` is text, 64 prompts × 8 answers of 64 tokens each; `tailed` the same with long-tailed lengths, 256 the
longest (four fifths of at most 48, one in twenty above 128); `pictures` the quickstart's model, rows and reward, 16
pictures × 8 answers that end by themselves. Each side is a process, one for each size of micro-batch (`--micro`), with
r1 one more whose micro-batches choose themselves, as its examples' do, and for TRL's `tailed` one more, which samples
by transformers' continuous batching; on fixed lengths that takes 5 times as long as `generate` (results/rollout.md).
Each takes a turn to warm up and one that counts; the best of r1 and the best of TRL then go on in turns. r1 does all
that a user gets: the proof that its engine has the weights, metrics, logs. TRL logs nothing; TRL with vLLM on a
processor is not tried. whole_steps/with_trl.py has TRL's settings.

Against another checkout: the whole quickstart in each, turns of ten steps, validations as its configuration says; steps
that validate or save are left out of the times. `--steps N` ends after so many.

With `--sizes`, r1 alone: each size of `--micro` and `auto`, all in turns; the ratio is of the step with `auto` to the
step with the best of those sizes (`auto_ratio`).

Ratios are of the medians of single steps, once by the clock and once by processor time, which other work on the machine
disturbs less: that of a side's processes from one turn's end to the next's. The last line is one JSON object, whose
ratios say how many times as many samples a second r1 gives (`…_ratio`), or the quickstart's step here to its step there
(`step_ratio`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from whole_steps.task import ANSWERS, Task

HERE = Path(__file__).resolve()
CHECKOUT = HERE.parents[1]
# `r1 train` lets waiting threads sleep soon, which TRL is to have, too.
SHARED = {"HF_HUB_OFFLINE": "1", "GOMP_SPINCOUNT": "10000"}
PROMPTS = {"fixed": 64, "tailed": 64, "pictures": 16}
LONGEST = {"fixed": 64, "tailed": 256, "pictures": 20}
TURN = {"fixed": 1, "tailed": 1, "pictures": 5}  # steps
MICRO = {"fixed": ["16", "32", "64"], "tailed": ["16", "32", "64"], "pictures": ["16", "32", "64"]}


@dataclass
class Side:
    """A trainer in a process of its own, and the steps that it has taken."""

    trainer: str
    micro: str
    child: "subprocess.Popen[str]"
    log: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    spent: float = 0.0  # processor seconds at the last look

    @classmethod
    def start(
        cls, trainer: str, micro: str, folder: Path, checkout: Path = CHECKOUT, file: Path | None = None
    ) -> "Side":
        """Start a side on the packages of a checkout; without a task's file it trains the quickstart."""
        sources = [str(place) for place in checkout.glob("packages/*/src")]
        log = folder / f"{trainer}-{micro}-{len(list(folder.glob('*.log')))}.log"
        command = [sys.executable, str(HERE), "--serve", trainer, "--micro", micro]
        child = subprocess.Popen(
            [*command, *(["--file", str(file)] if file else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, bufsize=1, cwd=checkout,
            env={**os.environ, **SHARED, "PYTHONPATH": os.pathsep.join(sources)},
        )  # fmt: skip
        return cls(trainer, micro, child, log)

    @property
    def name(self) -> str:
        return f"{self.trainer}, {self.micro}"

    def ready(self) -> None:
        """Wait until it could take a step."""
        self._read()
        self.spent = self._processor()

    def turn(self, steps: int) -> bool:
        """Let it take steps; whether it did."""
        assert self.child.stdin is not None
        print(steps, file=self.child.stdin, flush=True)
        taken = self._read().get("steps", [])
        now = self._processor()
        for step in taken:
            step["processor"] = (now - self.spent) / len(taken)
        self.spent = now
        self.steps += taken
        return bool(taken)

    def forget(self) -> None:
        """Leave what was so far out of the figures."""
        self.steps.clear()

    def median(self, key: str = "seconds") -> float:
        """Of its steps, those that validate or save left out."""
        plain = [step for step in self.steps if step.get("plain", True)]
        return statistics.median(step[key] for step in plain or self.steps)

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line and self.child.wait():
            raise SystemExit(f"{self.name} died:\n{self.log.read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def _processor(self) -> float:
        """Processor seconds of the process and of all that it has started."""
        try:
            process = psutil.Process(self.child.pid)
            family = [process, *process.children(recursive=True)]
            return sum(sum(one.cpu_times()[:4]) for one in family)  # user, system, and of children that have ended
        except psutil.NoSuchProcess:
            return self.spent


def show(sides: list[Side], samples: int) -> None:
    """Print where each second of a step went."""
    phases = sorted({name for side in sides for step in side.steps for name in step["phases"]})
    print(f"{'':24} {'s a step':>9} {'cpu s':>7} {'samples/s':>10}", *(f"{name:>10}" for name in [*phases, "the rest"]))
    for side in sides:
        plain = [step for step in side.steps if step.get("plain", True)]
        whole = side.median()
        parts = [statistics.median(step["phases"].get(name, 0.0) for step in plain) for name in phases]
        rest = statistics.median(step["seconds"] - sum(step["phases"].values()) for step in plain)
        figures = f"{side.name:24} {whole:9.3f} {side.median('processor'):7.2f} {samples / whole:10.1f}"
        said = statistics.fmean(step["tokens"] for step in plain)
        print(
            figures, *(f"{part:10.3f}" for part in [*parts, rest]), f"  {said:.1f} tokens a sample, {len(plain)} steps"
        )


def make(options: argparse.Namespace, folder: Path) -> Task:
    """Write the files of the task into `folder`."""
    from whole_steps.make import make_task

    kind = options.task
    prompts, tokens = options.prompts or PROMPTS[kind], options.tokens or LONGEST[kind]
    return make_task(kind, options.model, prompts, tokens, folder)


def start_sides(asked: list[tuple[str, str]], task: Task, folder: Path) -> list[Side]:
    """Start a side for each trainer and size; wait until all could take a step."""
    file = task.save(folder)
    sides = [Side.start(trainer, size, folder, file=file) for trainer, size in asked]
    for side in sides:
        side.ready()
    return sides


def compare_sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of a task with each size and with `auto`; return the ratios of `auto` to the best size."""
    with tempfile.TemporaryDirectory() as place:
        task = make(options, Path(place))
        micro = options.micro or MICRO[task.kind]
        sides = start_sides([("r1", size) for size in [*micro, "auto"]], task, Path(place))
        for turn in range(options.rounds + 1):
            for side in sides:
                side.turn(TURN[task.kind])
                if turn == 0:  # to warm up
                    side.forget()
        show(sides, task.samples)
        for side in sides:
            side.end()
    *fixed, auto = sides
    best = {key: min(side.median(key) for side in fixed) for key in ("seconds", "processor")}
    return {
        "task": task.kind, "prompts": task.prompts, "answers": ANSWERS, "tokens": task.tokens, "model": options.model,
        "micro": micro, "steps": len(auto.steps), "auto_ratio": auto.median() / best["seconds"],
        "auto_processor_ratio": auto.median("processor") / best["processor"],
    }  # fmt: skip


def against_trl(options: argparse.Namespace) -> dict[str, Any]:
    """Take the steps of a task on both sides; return the ratios."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        task = make(options, folder)
        kind, micro = task.kind, options.micro or MICRO[task.kind]
        asked = [(trainer, size) for size in micro for trainer in ("r1", "trl")]
        asked += [("r1", "auto"), *([("trl-paged", "32")] if kind == "tailed" else [])]
        sides = start_sides(asked, task, folder)
        for _ in range(2):  # a turn to warm up, and one to choose by
            for side in sides:
                side.forget()
                side.turn(TURN[kind])
        show(sides, task.samples)
        ours, theirs = (
            min((side for side in sides if side.trainer.startswith(name)), key=Side.median) for name in ("r1", "trl")
        )
        print(f"the best: {ours.name} and {theirs.name}", flush=True)
        for side in sides:
            side.forget()
            if side not in (ours, theirs):
                side.end()
        for _ in range(options.rounds):
            for side in (ours, theirs):
                side.turn(TURN[kind])
        show([ours, theirs], task.samples)
        for side in (ours, theirs):
            side.end()
    return {
        "task": kind, "prompts": task.prompts, "answers": ANSWERS, "tokens": task.tokens, "model": options.model,
        "r1_micro": ours.micro, "trl_micro": theirs.micro, "trl": theirs.trainer,
        f"{kind}_ratio": theirs.median() / ours.median(),
        f"{kind}_processor_ratio": theirs.median("processor") / ours.median("processor"),
    }  # fmt: skip


def against_checkout(options: argparse.Namespace) -> dict[str, Any]:
    """Run the quickstart here and there; return the ratio of their steps, and the accuracy that each ends with."""
    places = {"here": CHECKOUT, "there": Path(options.against).resolve()}
    with tempfile.TemporaryDirectory() as folder:
        sides = {name: Side.start("r1", "quickstart", Path(folder), place) for name, place in places.items()}
        for name, side in sides.items():
            side.trainer = name
            side.ready()
        left = options.steps
        while left > 0:
            for side in sides.values():
                side.turn(min(10, left))
            left -= 10
        for side in sides.values():
            side.end()
    for side in sides.values():
        side.steps = side.steps[10:] or side.steps  # the first turn warms up
    show([*sides.values()], 16 * ANSWERS)
    accuracies = {
        f"accuracy_{name}": [step["found"].get("val/accuracy_reward") for step in side.steps if step["found"]][-1:]
        for name, side in sides.items()
    }
    here, there = sides.values()
    return {
        "task": "quickstart", **accuracies, "steps": len(here.steps),
        "step_ratio": here.median() / there.median(),
        "step_processor_ratio": here.median("processor") / there.median("processor"),
    }  # fmt: skip


def serve(options: argparse.Namespace) -> None:
    """Be a side."""
    if options.serve == "r1":
        from whole_steps import with_r1

        if options.file:
            with_r1.serve_task(Task.read(options.file), options.micro[0])
        else:
            with_r1.serve_quickstart()
    else:
        from whole_steps import with_trl

        with_trl.serve_task(Task.read(options.file), options.micro[0], paged=options.serve == "trl-paged")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=PROMPTS, default="fixed")
    parser.add_argument("--model", choices=["tiny", "small"], default="tiny", help="of text")
    parser.add_argument("--prompts", type=int, help="of a step")
    parser.add_argument("--tokens", type=int, help="the longest answer, of text")
    parser.add_argument("--micro", nargs="+", help="samples a micro-batch, tried on both sides")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sizes", action="store_true", help="r1 alone: fixed sizes and `auto` in turns")
    parser.add_argument("--against", help="a checkout whose quickstart is timed in turn with this one's")
    parser.add_argument("--steps", type=int, default=140, help="of the quickstart")
    parser.add_argument("--serve", choices=["r1", "trl", "trl-paged"], help="for the processes that this one starts")
    parser.add_argument("--file", help="for them, too: the task")
    options = parser.parse_args()
    if options.serve:
        return serve(options)
    load = os.getloadavg()[0]
    compare = against_checkout if options.against else compare_sizes if options.sizes else against_trl
    found = compare(options)
    threads = os.environ.get("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    print(json.dumps({"benchmark": "end_to_end", "threads": threads, "load_before": round(load, 1), **found}))


if __name__ == "__main__":
    main()
