"""Learning curves of the small examples, from the records of their runs.

uv run python benchmarks/learning.py KIND=RUN … [--turns "episodes that look"] [--picture benchmarks/results/look.svg]

RUN is the folder of a run and KIND a word for its line, such as `uncovering` and `blind`; several seeds share one. From
the record of each training step come the share of right answers (the reward's part `accuracy`) and, with `--turns`, the
share of episodes in which the policy took at least two turns, that is, used its tool or environment. Prints the table,
and one JSON object as the last line: the means over runs of the last steps.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from r1_cli.runs.reader import RunReader

SHOWN = (0, 0.25, 0.5, 0.75, 1)  # shares of a run's steps that the table shows
FINAL = 5  # steps over which the final figures are averaged, unless `--last` is given
COLORS = ("#1f4e8c", "#c0504d", "#4f8c1f")  # of kinds, in the order given
WIDTH, HEIGHT = 300, 160  # of a panel, in pixels


@dataclass(frozen=True)
class Curve:
    kind: str
    seed: int
    steps: list[int]
    figures: Mapping[str, list[float]]  # name -> share of a step's answers, by step
    seconds: float  # of all steps, by the run's own clock

    def mean_of_last(self, figure: str, last: int) -> float:
        return fmean(self.figures[figure][-last:])

    def first_step_above(self, figure: str, share: float) -> int | None:
        """Return the step from which on a figure is at least `share` at every step."""
        below = [step for step, value in zip(self.steps, self.figures[figure], strict=True) if value < share]
        after = [step for step in self.steps if not below or step > below[-1]]
        return after[0] if after else None


def read_curve(kind: str, folder: Path, turns: str | None) -> Curve:
    reader = RunReader(folder)
    steps = reader.recorded_steps()
    figures: dict[str, list[float]] = {name: [] for name in ("right", turns) if name}
    for step in steps:
        answers = reader.samples(step)
        figures["right"].append(fmean(dict(one["parts"])["accuracy"] for one in answers))
        if turns:
            figures[turns].append(fmean(count_turns(one) >= 2 for one in answers))
    seconds = sum(float(record.get("perf/time_per_step", 0.0)) for record in reader.records())
    return Curve(kind, reader.settings()["data"]["seed"], steps, figures, seconds)


def count_turns(episode: dict[str, Any]) -> int:
    """Return how many turns the policy took; a run of single turns records none."""
    return sum(turn["role"] == "assistant" for turn in episode.get("turns") or ())


def format_table(curves: Sequence[Curve], last: int) -> str:
    end = max(one.steps[-1] for one in curves)
    shown = sorted({max(1, round(share * end)) for share in SHOWN})
    names = " | ".join([*(f"step {step}" for step in shown), f"last {last}"])
    lines = [f"| kind, seed | figure | {names} | seconds of all steps |", "|---" * (len(shown) + 4) + "|"]
    for one in curves:
        for number, (figure, values) in enumerate(one.figures.items()):
            at = dict(zip(one.steps, values, strict=True))
            cells = [f"{at[step]:.2f}" if step in at else "" for step in shown] + [
                f"{one.mean_of_last(figure, last):.2f}"
            ]
            head = ("", "") if number else (f"{one.kind}, {one.seed}", f"{one.seconds:.0f}")
            lines.append(f"| {head[0]} | {figure} | {' | '.join(cells)} | {head[1]} |")
    return "\n".join(lines)


def draw(curves: Sequence[Curve]) -> str:
    """Return an SVG with a panel for each figure, and a line for each run."""
    last = max(one.steps[-1] for one in curves)
    colors = dict(zip(dict.fromkeys(one.kind for one in curves), COLORS, strict=False))
    panels = []
    for place, figure in enumerate(curves[0].figures):
        lines = []
        for one in curves:
            points = " ".join(
                f"{step / last * WIDTH:.1f},{(1 - value) * HEIGHT:.1f}"
                for step, value in zip(one.steps, one.figures[figure], strict=True)
            )
            lines.append(f'<polyline fill="none" points="{points}" stroke="{colors[one.kind]}"/>')
        marks = [f'<text x="-4" y="{(1 - v) * HEIGHT + 4}" text-anchor="end">{v:g}</text>' for v in (0, 0.5, 1)]
        marks.append(f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{last} steps</text>')
        frame = f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#555"/><text y="-8">{figure}</text>'
        panels.append(f'<g transform="translate({40 + place * (WIDTH + 50)} 40)">{"".join(lines + marks)}{frame}</g>')
    names = [
        f'<text x="{40 + 110 * place}" y="14" fill="{color}">{kind}</text>'
        for place, (kind, color) in enumerate(colors.items())
    ]
    width = max(len(panels) * (WIDTH + 50), 110 * len(names)) + 10
    size = f'width="{width}" height="{HEIGHT + 65}" font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(names + panels)}</svg>\n'


def summarize(curves: Sequence[Curve], turns: str | None, last: int) -> dict[str, object]:
    kinds = dict.fromkeys(one.kind for one in curves)
    right = {kind: fmean(one.mean_of_last("right", last) for one in curves if one.kind == kind) for kind in kinds}
    summary: dict[str, object] = {"right": {kind: round(value, 3) for kind, value in right.items()}}
    if turns:
        summary[turns] = {f"{one.kind}-{one.seed}": round(one.mean_of_last(turns, last), 3) for one in curves}
        summary["0.95 from step"] = {f"{one.kind}-{one.seed}": one.first_step_above(turns, 0.95) for one in curves}
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="KIND=RUN", help="a word for the line, and the folder of a run")
    parser.add_argument("--turns", help="also the share of episodes of at least two turns, under this name")
    parser.add_argument("--last", type=int, default=FINAL, help="steps over which the final figures are averaged")
    parser.add_argument("--picture", type=Path, help="write the curves as SVG to this file")
    arguments = parser.parse_args()
    named = [run.partition("=") for run in arguments.runs]
    curves = [read_curve(kind, Path(folder), arguments.turns) for kind, _, folder in named]
    print(format_table(curves, arguments.last))
    if arguments.picture:
        arguments.picture.write_text(draw(curves))
    print(json.dumps(summarize(curves, arguments.turns, arguments.last)))


if __name__ == "__main__":
    main()
