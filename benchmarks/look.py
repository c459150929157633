"""Learning curves of examples/look: is looking learned, and what is it worth?

uv run python benchmarks/look.py RUN … [--picture benchmarks/results/look.svg]

RUN is the folder of a run of examples/look/config.yaml with `trainer.save_checkpoint_path=RUN`, with and without
`worker.rollout.multi_turn.environment_kwargs.blind=true`, which shows the cover again. From the record of each training
step come the share of right answers and the share of episodes that look, i.e. have at least two turns of the policy.
Prints the table, and one JSON object as the last line.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from r1_cli.runs.reader import RunReader

STEPS = (1, 10, 20, 30, 40)
LAST = 5  # steps over which the final figures are averaged
COLORS = {"uncovering": "#1f4e8c", "blind": "#c0504d"}
WIDTH, HEIGHT = 300, 160  # of a panel, in pixels


@dataclass(frozen=True)
class Curve:
    kind: str  # uncovering or blind
    seed: int
    steps: list[int]
    right: list[float]  # share of episodes with the right answer, by step
    looks: list[float]  # share of episodes that look, by step
    seconds: float  # of all steps, by the run's own clock

    def mean_of_last(self, values: list[float]) -> float:
        return fmean(values[-LAST:])

    def first_step_above(self, share: float) -> int | None:
        """Return the step from which on at least `share` of each step's episodes look."""
        below = [step for step, looks in zip(self.steps, self.looks, strict=True) if looks < share]
        after = [step for step in self.steps if not below or step > below[-1]]
        return after[0] if after else None


def read_curve(folder: Path) -> Curve:
    reader = RunReader(folder)
    settings = reader.settings()
    blind = settings["worker"]["rollout"]["multi_turn"]["environment_kwargs"].get("blind", False)
    steps = reader.recorded_steps()
    right, looks = [], []
    for step in steps:
        episodes = reader.samples(step, columns=["parts", "turns"])
        right.append(fmean(dict(one["parts"])["accuracy"] for one in episodes))
        looks.append(fmean(count_turns(one) >= 2 for one in episodes))
    lines = (folder / "experiment_log.jsonl").read_text().splitlines()
    seconds = sum(json.loads(line).get("perf/time_per_step", 0.0) for line in lines)
    return Curve("blind" if blind else "uncovering", settings["data"]["seed"], steps, right, looks, seconds)


def count_turns(episode: dict[str, Any]) -> int:
    """Return how many turns the policy took."""
    return sum(turn["role"] == "assistant" for turn in episode["turns"])


def format_table(curves: list[Curve]) -> str:
    names = " | ".join([*(f"step {step}" for step in STEPS), f"last {LAST}"])
    lines = [f"| kind, seed | figure | {names} | seconds |", "|---" * (len(STEPS) + 4) + "|"]
    for one in curves:
        for figure, values in (("right", one.right), ("looks", one.looks)):
            at = dict(zip(one.steps, values, strict=True))
            cells = [f"{at[step]:.2f}" if step in at else "" for step in STEPS] + [f"{one.mean_of_last(values):.2f}"]
            head = (f"{one.kind}, {one.seed}", f"{one.seconds:.0f}") if figure == "right" else ("", "")
            lines.append(f"| {head[0]} | {figure} | {' | '.join(cells)} | {head[1]} |")
    return "\n".join(lines)


def draw(curves: list[Curve]) -> str:
    """Return an SVG with two panels, right answers and episodes that look, and a line for each run."""
    last = max(one.steps[-1] for one in curves)
    panels = []
    for place, (title, figure) in enumerate((("right answers", "right"), ("episodes that look", "looks"))):
        lines = []
        for one in curves:
            values = one.right if figure == "right" else one.looks
            points = " ".join(
                f"{step / last * WIDTH:.1f},{(1 - value) * HEIGHT:.1f}"
                for step, value in zip(one.steps, values, strict=True)
            )
            lines.append(f'<polyline fill="none" points="{points}" stroke="{COLORS[one.kind]}"/>')
        marks = [f'<text x="-4" y="{(1 - v) * HEIGHT + 4}" text-anchor="end">{v:g}</text>' for v in (0, 0.5, 1)]
        marks.append(f'<text x="{WIDTH}" y="{HEIGHT + 14}" text-anchor="end">{last} steps</text>')
        frame = f'<path d="M0 0V{HEIGHT}H{WIDTH}" fill="none" stroke="#555"/><text y="-8">{title}</text>'
        panels.append(f'<g transform="translate({40 + place * (WIDTH + 50)} 40)">{"".join(lines + marks)}{frame}</g>')
    names = [
        f'<text x="{40 + 90 * place}" y="14" fill="{color}">{kind}</text>'
        for place, (kind, color) in enumerate(COLORS.items())
    ]
    size = f'width="{2 * (WIDTH + 50) + 10}" height="{HEIGHT + 65}" font-family="sans-serif" font-size="11"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{background}{"".join(names + panels)}</svg>\n'


def summarize(curves: list[Curve]) -> dict[str, object]:
    """Return the means over runs of the last steps, and what looking is worth."""
    kinds = {kind: [one for one in curves if one.kind == kind] for kind in COLORS}
    right = {kind: fmean(one.mean_of_last(one.right) for one in ones) for kind, ones in kinds.items() if ones}
    looks = {f"{one.kind}-{one.seed}": round(one.mean_of_last(one.looks), 3) for one in curves}
    reached = {f"{one.kind}-{one.seed}": one.first_step_above(0.95) for one in curves}
    gain = round(right["uncovering"] - right["blind"], 3) if len(right) == 2 else None
    return {"right": right, "gain": gain, "looks": looks, "looks_0.95_from_step": reached}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--picture", type=Path, help="write the curves as SVG to this file")
    arguments = parser.parse_args()
    curves = sorted(map(read_curve, arguments.runs), key=lambda one: (one.kind == "blind", one.seed))
    print(format_table(curves))
    if arguments.picture:
        arguments.picture.write_text(draw(curves))
    print(json.dumps(summarize(curves)))


if __name__ == "__main__":
    main()
