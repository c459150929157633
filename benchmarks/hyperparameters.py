"""Learning rate, group size, KL and temperature on the quickstart's task: accuracy after equally many answers.

    uv run python benchmarks/hyperparameters.py run [ROW …] [--seeds 1 2 3]   # what is missing; killed, it resumes
    uv run python benchmarks/hyperparameters.py show                          # the tables of the page

Runs, seeds and figures are those of `examples/compare.py`: GRPO, 24 steps of 128 answers, four optimizer steps each.
"""

import argparse
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

import compare  # noqa: E402

RESULTS = ROOT / "benchmarks/results/hyperparameters.jsonl"
LORA = ("worker.actor.model.lora.rank=16", "worker.actor.model.lora.alpha=32")
KL = ("algorithm.disable_kl=false", "algorithm.use_kl_loss=true", "algorithm.kl_penalty=low_var_kl")


def grouped(answers: int) -> tuple[str, ...]:
    """Return the settings of a step of 128 answers in groups of so many."""
    prompts = compare.PROMPTS * compare.ANSWERS // answers
    return (
        f"worker.rollout.n={answers}",
        f"data.rollout_batch_size={prompts}",
        f"worker.actor.global_batch_size={max(prompts // 4, 1)}",
    )


def rated(rate: str) -> tuple[str, ...]:
    return (f"worker.actor.optim.lr={rate}",)


TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "learning rate, all weights": {rate: rated(rate) for rate in ("1e-6", "1e-5", "3e-5", "1e-4", "3e-4", "1e-3")},
    "learning rate, LoRA of rank 16": {rate: (*LORA, *rated(rate)) for rate in ("1e-4", "1e-3", "3e-3")},
    "answers to a prompt": {str(n): grouped(n) for n in (2, 4, 8, 16, 32)},
    "coefficient of the KL in the loss": {
        one: (*KL, f"algorithm.kl_coef={one}") if float(one) else () for one in ("0", "0.001", "0.01", "0.1", "1")
    },
    "temperature": {one: (f"worker.rollout.temperature={one}",) for one in ("0.5", "0.7", "1.0", "1.3")},
}
ROWS = {f"{title}: {value}": words for title, rows in TABLES.items() for value, words in rows.items()}
compare.ROWS |= {name: compare.Row(name, words) for name, words in ROWS.items()}
# The quickstart's own settings are one run, which every table shows.
BASE = "learning rate, all weights: 1e-4"
SAME = dict.fromkeys(("answers to a prompt: 8", "coefficient of the KL in the loss: 0", "temperature: 1.0"), BASE)


def accuracy(curve: list[list[float]], part: float) -> float:
    """Return the accuracy after a part of a run, whose steps all have as many answers.

    `compare` counts eight answers a group, so its counts of answers are not those of other groups.
    """
    return compare.at(curve, part * curve[-1][0])


def show(results: Path) -> None:
    """Print a table for each hyperparameter: accuracy before, after half and after all answers, and the entropy."""
    ones = compare.read_results(results)
    for title, rows in TABLES.items():
        print(f"\n| {title} | runs | before | after half | after | entropy at the end |\n|---|---|---|---|---|---|")
        for value in rows:
            name = f"{title}: {value}"
            found = [one for one in ones if one["row"] == SAME.get(name, name)]
            if not found:
                continue
            halves = [compare.spread([accuracy(one["curve"], part) for one in found]) for part in (0, 0.5, 1)]
            entropy = fmean(fmean(one["entropy"][-8:]) for one in found)
            print(f"| {value} | {len(found)} | {' | '.join(halves)} | {entropy:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("rows", nargs="*", metavar="ROW", help="such as `temperature: 0.5`; none: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--results", type=Path, default=RESULTS, help="a line of JSON for each run")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.rows if name not in ROWS]:
        parser.error(f"no row is called {', '.join(unknown)}; rows: {', '.join(ROWS)}")
    if arguments.what == "show":
        show(arguments.results)
    else:
        names = arguments.rows or [name for name in ROWS if name not in SAME]
        compare.run(names, arguments.seeds, compare.STEPS, arguments.results)


if __name__ == "__main__":
    main()
