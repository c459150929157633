"""What sampled answers are worth on the quickstart: rejection sampling, and RL on a band of pass rates.

uv run python benchmarks/sampling.py FOLDER [--seeds 1 2 3] [--only choosing | band] [--dead 0 0.25 0.5 0.75]

`choosing`: the quickstart's model answers 512 rows 8 times; `r1 sft` on one right answer a row, and on as many by lot.

`band`: GRPO on 256 rows. A share `--dead` of them shows 5 to 7 shapes, which the model never answers rightly: it knows
the numbers to 4. It trains on all rows; on those whose pass rate in 4 sampled answers is in a band; and, as a control,
with a filter of groups without a signal. Counts the tokens until an accuracy of 95 % of the run on all rows at its end.

Prints a table of each, and the processor time; commands whose output FOLDER has already are not repeated.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq

sys.path.insert(0, "examples/quickstart")
from make_data import (
    BACKGROUNDS,
    FAMILIES,
    QUESTIONS,
    draw_picture,
    encode_png,
    place_shapes,
    write_rows,
)

QUICKSTART = Path("examples/quickstart")
CONFIG, MODEL, COLUMNS = QUICKSTART / "config.yaml", QUICKSTART / "model", ("images", "problem", "answer")
ROWS, ANSWERS = 512, 8
ALIKE = [
    "data.filter_overlong_prompts_workers=1",
    "worker.actor.micro_batch_size_per_device_for_update=32",
    "worker.actor.micro_batch_size_per_device_for_experience=64",
    "worker.actor.optim.lr_scheduler_type=constant",
    "trainer.logger=[file]",
    "trainer.record_gb=0",
]
BAND_ROWS, RATED, PROMPTS, STEPS = 256, 4, 16, 64  # rows, answers a row for its pass rate, prompts a step, steps
FILTERED_STEPS = 48  # of the filter, which samples two to four times the tokens
BAND, TOO_MANY = (0.1, 0.9), (5, 6, 7)  # pass rates; shapes in a picture that the model cannot answer
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


def sample(output: Path, rows: object, seed: int, answers: int) -> Path:
    words = [ALIKE[0], f"data.train_files={rows}", f"worker.rollout.seed={seed}"]
    return r1(output, "sample", MODEL, CONFIG, *words, "--n", answers, "--output", output)


# --- fine-tuning on chosen answers ------------------------------------------------------------------------------------


def choosing(folder: Path, seed: int) -> list[tuple[str, list[float]]]:
    """Return accuracies at the start and after 10 and 20 steps, on chosen answers and on answers by lot."""
    chosen = folder / f"chosen-{seed}.parquet"
    sampled = sample(folder / f"samples-{seed}", QUICKSTART / f"train.parquet[:{ROWS}]", seed, ANSWERS)
    r1(chosen, "rows", sampled, "--as", "sft", "--control", "--output", chosen)
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
    prompts: int  # a step
    tokens: list[float]  # sampled until each validation
    accuracy: list[float]

    @property
    def end(self) -> float:
        return fmean(self.accuracy[-LAST:])

    def tokens_until(self, accuracy: float) -> float | None:
        """Return the tokens until this accuracy, interpolated between two validations."""
        for (low, before), (high, after) in pairwise(zip(self.tokens, self.accuracy, strict=True)):
            if after >= accuracy:
                return low + (high - low) * max(0.0, accuracy - before) / (after - before)
        return None


def read(run: Path) -> list[tuple[float, float]]:
    """Return (tokens sampled until then, accuracy) of each validation."""
    found, tokens = list[tuple[float, float]](), 0.0
    for line in (run / "experiment_log.jsonl").read_text().splitlines():
        record = json.loads(line)
        tokens += record.get("rollout/tokens_sampled", 0.0)
        if ACCURACY in record:
            found.append((tokens, record[ACCURACY]))
    return found


def write_mixture(path: Path, dead: float) -> Path:
    """Write BAND_ROWS rows: those of the quickstart, and a share `dead` of pictures with too many shapes."""
    count, rng = round(BAND_ROWS * dead), random.Random(1)
    rows = pq.read_table(QUICKSTART / "train.parquet").slice(0, BAND_ROWS - count).select(COLUMNS).to_pylist()
    for number in range(count):
        shapes = place_shapes(rng, TOO_MANY[number % len(TOO_MANY)], FAMILIES[number % len(FAMILIES)])
        image = {"bytes": encode_png(draw_picture(shapes, rng.choice(BACKGROUNDS))), "path": f"{number}.png"}
        rows.append({"images": [image], "problem": f"<image>{rng.choice(QUESTIONS)}", "answer": str(len(shapes))})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(rows, path)
    return path


def band(folder: Path, seed: int, dead: float, *, filtered: bool) -> tuple[float, dict[str, Curve]]:
    """Return the tokens of the answers that gave the pass rates, and the curve of each kind of run."""
    rows = write_mixture(folder / f"mixture-{dead}.parquet", dead)
    rated = folder / f"rated-{dead}-{seed}.parquet"
    sampled = sample(folder / f"band-samples-{dead}-{seed}", rows, seed, RATED)
    r1(rated, "rows", sampled, "--as", "rates", "--few", "--output", rated)
    table = pq.read_table(rated, columns=["pass_rate", "mean_tokens"]).to_pylist()
    kept = sum(BAND[0] <= row["pass_rate"] <= BAND[1] for row in table)
    fewer = round(PROMPTS * kept / BAND_ROWS)  # as many steps an epoch as on all rows
    only = ["data.curriculum.by=pass_rate", f"data.curriculum.band=[{BAND[0]},{BAND[1]}]"]
    kinds: dict[str, tuple[int, list[str]]] = {
        "all rows": (PROMPTS, []),
        "band": (PROMPTS, only),
        "all rows, fewer prompts": (fewer, []),
        "band, fewer prompts": (fewer, only),
    }
    if filtered:
        kinds["filter, fewer prompts"] = fewer, ["algorithm.online_filtering=true", "algorithm.filter_key=accuracy"]
    curves = {}
    for name, (prompts, more) in kinds.items():
        run = folder / f"train-{dead}-{seed}-{name.replace(', ', '-').replace(' ', '-')}"
        words = [f"data.train_files={rated}", f"data.seed={seed}", f"worker.rollout.seed={seed}", *ALIKE, *more]
        words += [f"data.rollout_batch_size={prompts}", f"worker.actor.global_batch_size={prompts}"]
        steps = FILTERED_STEPS if name.startswith("filter") else STEPS
        words += ["worker.actor.optim.lr=3e-5", f"trainer.max_steps={steps}", "trainer.val_freq=4"]
        words += ["trainer.save_freq=-1", "worker.rollout.val_override_config.n=2"]
        r1(run, "train", CONFIG, *words, f"trainer.save_checkpoint_path={run}")
        curves[name] = Curve(prompts, *map(list, zip(*read(run), strict=True)))
    return sum(row["mean_tokens"] * RATED for row in table), curves


def print_bands(label: str, rating: float, curves: dict[str, Curve]) -> None:
    bar = SHARE * curves["all rows"].end
    needed = curves["all rows"].tokens_until(bar)
    for name, curve in curves.items():
        own, cells = curve.tokens_until(bar), ["never", "", ""]
        if own is not None and needed is not None:
            whole = own + (rating if name.startswith("band") else 0)
            cells = [f"{own:,.0f}", f"{own / needed:.2f}", f"{whole / needed:.2f}"]
        print(f"| {label} | {name} | {curve.prompts} | {curve.end:.3f} | {bar:.3f} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", choices=["choosing", "band"])
    parser.add_argument("--dead", type=float, nargs="+", default=[0.5], help="share of rows without a signal")
    parser.add_argument("--filter", action="store_true", help="compare with online_filtering, too, which samples more")
    given = parser.parse_args()
    if given.only != "band":
        print("| accuracy | start | 10 steps | 20 steps |\n|---|---|---|---|")
        for seed in given.seeds:
            for name, values in choosing(given.folder, seed):
                print(f"| {name} | {' | '.join(f'{value:.3f}' for value in values)} |", flush=True)
    if given.only != "choosing":
        print(
            "| dead | seed | rows | prompts a step | accuracy at the end | bar | tokens until it | × all rows", end=""
        )
        print(f" | with pass rates |\n|{'---|' * 9}")
        for dead in given.dead:
            for seed in given.seeds:
                print_bands(f"{dead} | {seed}", *band(given.folder, seed, dead, filtered=given.filter))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"processor time of the commands: {used.ru_utime + used.ru_stime:.0f} s")


if __name__ == "__main__":
    main()
