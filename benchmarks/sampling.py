"""What sampled answers are worth on the quickstart: rejection sampling, and RL on a band of pass rates.

uv run python benchmarks/sampling.py FOLDER [--seeds 1 2 3] [--only choosing | band]

For each seed, the quickstart's model answers 512 rows 8 times. `choosing`: `r1 sft` on one right answer a row, and on
as many by lot. `band`: GRPO on all 512 rows, and on those whose pass rate is in a band; tokens until its accuracy is
that of the run on all rows. Prints a table of each; commands whose output FOLDER has already are not repeated.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

CONFIG, MODEL = "examples/quickstart/config.yaml", "examples/quickstart/model"
ROWS, ANSWERS, STEPS = 512, 8, 48
ALIKE = [
    "data.filter_overlong_prompts_workers=1",
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
    "worker.actor.optim.lr_scheduler_type=constant",
    "trainer.logger=[file]",
    "trainer.record_gb=0",
]
BANDS = {"all rows": None, "0.1 to 0.9": "[0.1,0.9]", "0.25 to 0.75": "[0.25,0.75]"}
ACCURACY = "val/accuracy_reward"
LAST = 3  # validations whose mean is a run's accuracy at its end
SHARE = 0.95  # of that accuracy, which is to be reached


def r1(folder: Path, *words: object) -> Path:
    """Run a command of r1 that writes `folder`, unless it has."""
    if not (folder.parent / f"{folder.name}.done").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.txt").open("w") as log:
            command = [sys.executable, "-m", "r1_cli.main", *map(str, words)]
            subprocess.run(command, check=True, stdout=log, stderr=log)
        (folder.parent / f"{folder.name}.done").touch()
    return folder


def sample(folder: Path, seed: int) -> Path:
    rows, noise = f"data.train_files=examples/quickstart/train.parquet[:{ROWS}]", f"worker.rollout.seed={seed}"
    output = folder / f"samples-{seed}"
    return r1(output, "sample", MODEL, CONFIG, *ALIKE[:1], rows, noise, "--n", ANSWERS, "--output", output)


# --- fine-tuning on chosen answers ------------------------------------------------------------------------------------


def choosing(folder: Path, seed: int) -> list[tuple[str, list[float]]]:
    """Return accuracies at the start and after 10 and 20 steps, on chosen answers and on answers by lot."""
    chosen = folder / f"chosen-{seed}.parquet"
    r1(chosen, "rows", sample(folder, seed), "--as", "sft", "--control", "--output", chosen)
    found = []
    for kind, rows in (("one right answer a row", chosen), ("control", chosen.with_suffix(".control.parquet"))):
        run = folder / f"sft-{seed}-{kind.split()[0]}"
        steps = ["sft.epochs=5", "trainer.max_steps=20", "trainer.val_freq=10", "trainer.val_before_train=true"]
        words = [f"data.train_files={rows}", f"data.seed={seed}", "worker.actor.optim.lr=1e-4", *ALIKE[3:], *steps]
        r1(run, "sft", "benchmarks/cold_start.yaml", *words, f"trainer.save_checkpoint_path={run}")
        found.append((f"seed {seed}, {kind}", [value for _, value in read(run)]))
    return found


# --- training on a band -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    tokens: list[float]  # sampled until each validation
    accuracy: list[float]

    @property
    def end(self) -> float:
        return fmean(self.accuracy[-LAST:])

    def tokens_until(self, accuracy: float) -> float | None:
        return next((n for n, value in zip(self.tokens, self.accuracy, strict=True) if value >= accuracy), None)


def read(run: Path) -> list[tuple[float, float]]:
    """Return (tokens sampled until then, accuracy) of each validation."""
    found, tokens = list[tuple[float, float]](), 0.0
    for line in (run / "experiment_log.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens += record.get("rollout/tokens_sampled", 0.0)
        if ACCURACY in record:
            found.append((tokens, record[ACCURACY]))
    return found


def band(folder: Path, seed: int) -> dict[str, Curve]:
    rated = folder / f"rated-{seed}.parquet"
    r1(rated, "rows", sample(folder, seed), "--as", "rates", "--output", rated)
    rows = [f"data.train_files={rated}", f"data.seed={seed}", f"worker.rollout.seed={seed}"]
    steps = [f"trainer.max_steps={STEPS}", "trainer.val_freq=4", "trainer.save_freq=-1"]
    curves = {}
    for name, ends in BANDS.items():
        run = folder / f"train-{seed}-{name.replace(' ', '-')}"
        only = [] if ends is None else ["data.curriculum.by=pass_rate", f"data.curriculum.band={ends}"]
        words = [*ALIKE, *rows, *steps, *only, "worker.rollout.val_override_config.n=2"]
        r1(run, "train", CONFIG, *words, f"trainer.save_checkpoint_path={run}")
        curves[name] = Curve(*map(list, zip(*read(run), strict=True)))
    return curves


def print_bands(seed: int, curves: dict[str, Curve]) -> None:
    everything = curves["all rows"]
    bar = SHARE * everything.end
    needed = everything.tokens_until(bar)
    for name, curve in curves.items():
        own = curve.tokens_until(bar)
        cells = ("never", "") if own is None else (f"{own:,.0f}", f"{own / needed:.2f}" if needed else "")
        print(f"| {seed} | {name} | {curve.end:.3f} | {bar:.3f} | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=["choosing", "band"])
    given = parser.parse_args()
    if given.only != "band":
        print("| accuracy | start | 10 steps | 20 steps |\n|---|---|---|---|")
        for seed in given.seeds:
            for name, values in choosing(given.folder, seed):
                print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |", flush=True)
    if given.only != "choosing":
        print("| seed | rows | accuracy at the end | bar | tokens until it | × all rows |\n|---|---|---|---|---|---|")
        for seed in given.seeds:
            print_bands(seed, band(given.folder, seed))


if __name__ == "__main__":
    main()
