"""Accuracy in validation of fine-tuning runs, beside their controls.

uv run python benchmarks/fine_tuning.py KIND=RUN …

RUN is the folder of a run of `r1 sft` with `sft.val_generations=true`, and KIND a word for its row, such as `right` and
`control`. Prints a table of the share of right answers by step.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from r1_cli.runs.reader import RunReader

FIGURE = "val/accuracy_reward"


def read_accuracy(folder: Path) -> dict[int, float]:
    return {int(one["step"]): float(one[FIGURE]) for one in RunReader(folder).records() if FIGURE in one}


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
    named = [run.partition("=") for run in parser.parse_args().runs]
    print(format_table([(kind, read_accuracy(Path(folder))) for kind, _, folder in named]))


if __name__ == "__main__":
    main()
