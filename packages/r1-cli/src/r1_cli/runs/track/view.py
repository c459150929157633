"""The terminal view of a run: stage, rates, time left, curves and the last answers."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.box import ROUNDED
from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from r1_cli.runs.track.types import Generation, Record

# The stages of a step, as `Stopwatch` knows them, in words.
STAGES = {
    "step": "sync",  # which it begins with
    "sync": "sync",
    "render": "prompts",
    "gen": "sampling",
    "wait": "waiting for groups",
    "reward": "rewards",
    "old": "old log-probs",
    "ref": "reference log-probs",
    "values": "the critic's values",
    "adv": "advantages",
    "update_actor": "update",
    "update_critic": "the critic's update",
    "validation": "validation",
    "save_checkpoint": "saving",
}
LINES = 4  # of a curve
LEAST_HEIGHT = 24  # lines of a terminal that has room for curves and answers
RECENT = 10  # steps whose time foretells the rest
BLOCKS = " ▁▂▃▄▅▆▇█"  # of a line, from nothing to all of it
LABEL = 9  # characters of the numbers beside a curve


def seconds_of(record: Record) -> float:
    """Return the seconds of a logged step, with what followed it."""
    return sum(record.get(f"timing_s/{name}", 0.0) for name in ("step", "validation", "save_checkpoint"))


def seconds_left(recent: Sequence[float], step: int, total: int) -> float | None:
    """Return the seconds that the rest of a run takes, by the times of its recent steps; None without one."""
    return None if not recent else max(total - step, 0) * sum(recent) / len(recent)


@dataclass(slots=True)
class View:
    title: str
    step: int  # whole ones
    total: int
    begun: float = field(default_factory=time.monotonic)
    stage: str = ""
    within: str = ""  # how far the stage is
    reward: list[tuple[float, float]] = field(default_factory=list)  # (step, value)
    validation: list[tuple[float, float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the last steps
    last: Record = field(default_factory=dict)
    answers: Sequence[Generation] = ()
    processes: str = ""  # a line about ranks and engines

    def update(self, step: int, record: Record, answers: Sequence[Generation]) -> None:
        self.step, self.stage, self.within = step, "", ""
        self.last = {**record}
        if "reward/overall" in record:
            self.reward.append((step, record["reward/overall"]))
        if "val/reward_score" in record:
            self.validation.append((step, record["val/reward_score"]))
        if "timing_s/step" in record:
            self.seconds = [*self.seconds[1 - RECENT :], seconds_of(record)]
        self.answers = pick(answers) or self.answers

    def seconds_left(self) -> float | None:
        return seconds_left(self.seconds, self.step, self.total)

    def draw(self, width: int, height: int) -> RenderableType:
        """Return the view for a terminal of this size; a low one shows only the first lines."""
        inner = max(width - 4, 20)
        parts: list[RenderableType] = [self._progress(inner), self._rates()]
        if self.processes:
            parts.append(Text(self.processes, no_wrap=True, overflow="ellipsis"))
        if height >= LEAST_HEIGHT:
            for name, points in (("reward", self.reward), ("validation", self.validation)):
                if points:
                    parts.append(self._curve(name, points, inner))
            parts += self._answers(inner)
        title = Text(self.title, no_wrap=True, overflow="ellipsis")
        return Panel(Group(*parts), title=title, title_align="left", box=ROUNDED, padding=(0, 1), width=width)

    def _progress(self, width: int) -> RenderableType:
        grid = Table.grid(padding=(0, 1))
        stage = " ".join(filter(None, (STAGES.get(self.stage, self.stage), self.within)))
        left = self.seconds_left()
        times = clock(time.monotonic() - self.begun) + ("" if left is None else f", {clock(left)} left")
        bar = ProgressBar(total=max(self.total, 1), completed=self.step, width=max(min(width // 4, 40), 8))
        words = (f"step {self.step}/{self.total}", "bold"), (stage, "cyan"), (times, "")
        counted, doing, timed = (Text(word, style, no_wrap=True, overflow="ellipsis") for word, style in words)
        grid.add_row(counted, bar, doing, timed)
        return grid

    def _rates(self) -> Text:
        shown = []
        for key, words in (
            ("reward/overall", "reward {:.3f}"),
            ("reward/failures", "{:.0f} failed"),
            ("perf/samples_per_second", "{} samples/s"),
            ("perf/throughput", "{} tokens/s a device"),
            ("response_length/mean", "{} tokens an answer"),
            ("response_length/clip_ratio", "{:.0%} cut off"),
        ):
            value = self.last.get(key)
            if value is not None and not (key == "reward/failures" and not value):
                shown.append(words.format(value if ":" in words else quantity(value)))
        return Text(" · ".join(shown) or "the first step is under way", no_wrap=True, overflow="ellipsis")

    def _curve(self, name: str, points: Sequence[tuple[float, float]], width: int) -> Text:
        finite = [value for _, value in points if math.isfinite(value)]
        room = max(width - LABEL - 2, 10)
        lines = plot(points, room, LINES, points[0][0], max(self.step, points[0][0] + 1))
        labels = [""] * LINES
        if finite:
            labels[0], labels[-1] = f"{max(finite):.3g}", f"{min(finite):.3g}"
        best = max(points, key=lambda one: one[1] if math.isfinite(one[1]) else -math.inf)
        text = Text(f"{name} {points[-1][1]:.3f}, best {best[1]:.3f} at step {best[0]:.0f}\n", style="bold")
        for label, line in zip(labels, lines, strict=True):
            text.append(f"{label:>{LABEL}} ", style="dim")
            text.append(f"{line}\n", style="green" if name == "reward" else "blue")
        text.rstrip()
        return text

    def _answers(self, width: int) -> list[Text]:
        found = []
        for one in self.answers:
            said = visible(" ".join(one.response[: 4 * width].split()))
            mark = Text(f"{one.score:>6.2f} ", style="green" if one.score > 0 else "red")
            room = width - 7
            found.append(mark + Text(said if cell_len(said) <= room else set_cell_size(said, room - 1) + "…"))
        return [Text("the last answers, with their scores", style="bold"), *found] if found else []


def pick(answers: Sequence[Generation]) -> list[Generation]:
    ranked = sorted([one for one in answers if one.split == "train"] or answers, key=lambda one: -one.score)
    places = sorted({0, len(ranked) // 2, len(ranked) - 1}) if ranked else []
    return [ranked[place] for place in places]


def clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hours}:{minutes:02}:{rest:02}"


def quantity(value: float) -> str:
    """Return a short number, such as 0.53, 12.4, 430, 5.1k, 2.3M."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def visible(text: str) -> str:
    r"""Return `text` with unprintable characters escaped, such as `\\x1b`."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def plot(points: Sequence[tuple[float, float]], width: int, height: int, first: float, last: float) -> list[str]:
    """Return a line chart of block characters, `height` lines of `width` characters, top line first.

    A column shows the mean of its points, or the previous column's. The lowest value is one block high, the highest
    fills all lines, and a constant is half-way up. Nonfinite points are ignored.

    Args: points: (place, value). first, last: places of the left and right edges.
    """
    columns = _held(spread(points, width, first, last))
    known = [value for value in columns if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    levels = [None if value is None else _level(value, low, high, height) for value in columns]
    return ["".join(_block(level, line) for level in levels) for line in reversed(range(height))]


def spread(points: Sequence[tuple[float, float]], width: int, first: float, last: float) -> list[float | None]:
    sums, counts = [0.0] * width, [0] * width
    for place, value in points:
        if math.isfinite(value) and first <= place <= last:
            column = min(int((place - first) / max(last - first, 1e-9) * width), width - 1)
            sums[column] += value
            counts[column] += 1
    return [total / count if count else None for total, count in zip(sums, counts, strict=True)]


def _held(columns: list[float | None]) -> list[float | None]:
    known = [place for place, value in enumerate(columns) if value is not None]
    held = list(columns)
    for place in range(known[0] + 1, known[-1]) if known else ():
        held[place] = held[place - 1] if held[place] is None else held[place]
    return held


def _level(value: float, low: float, high: float, height: int) -> int:
    most = 8 * height
    return most // 2 if high <= low else max(1, round((value - low) / (high - low) * most))


def _block(level: int | None, line: int) -> str:
    return BLOCKS[min(max((level or 0) - 8 * line, 0), 8)]
