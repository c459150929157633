"""Accuracy in validation of fine-tuning runs, beside their controls.

uv run python benchmarks/fine_tuning.py KIND=RUN … [--figure val/accuracy]

RUN is the folder of a run with validation, and KIND a word for its row, such as `right` and `control`. Prints a table
by step of the share of right answers (of `r1 sft`, if `sft.val_generations=true`), or of another figure:
`val/accuracy` is a reward model's share of pairs whose chosen answer has the higher reward.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from r1_cli.runs.reader import RunReader


def read_figure(folder: Path, figure: str) -> dict[int, float]:
    return {int(one["step"]): float(one[figure]) for one in RunReader(folder).records() if figure in one}


def format_table(runs: Sequence[tuple[str, dict[int, float]]]) -> str:
    steps = sorted({step for _, found in runs for step in found})
    lines = [f"| trained on | {' | '.join(f'step {step}' for step in steps)} |", "|---" * (len(steps) + 1) + "|"]
    for kind, found in runs:
        cells = [f"{found[step]:.3f}" if step in found else "" for step in steps]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="KIND=RUN", help="a word for the row, and the folder of a run")
    parser.add_argument("--figure", default="val/accuracy_reward")
    arguments = parser.parse_args()
    named = [run.partition("=") for run in arguments.runs]
    print(format_table([(kind, read_figure(Path(folder), arguments.figure)) for kind, _, folder in named]))


if __name__ == "__main__":
    main()
