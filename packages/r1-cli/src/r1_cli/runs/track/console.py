"""Terminal output of a run: the view, progress bars, a line for each step and validation."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import transformers
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from r1_cli.runs import processes
from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Generation
from r1_cli.runs.track.view import View, visible

Item = TypeVar("Item")

# What a step's line shows, in this order; where a terminal is too narrow, those of the highest number go first.
STEP_COLUMNS = (
    ("reward/overall", "reward", 0),
    ("sft/nll", "nll", 0),
    ("rewards/margins", "margin", 0),
    ("reward_loss", "loss", 0),
    ("accuracy", "accuracy", 0),
    ("margin", "margin", 0),
    ("reward/failures", "failed", 0),
    ("response_length/mean", "length", 2),
    ("actor/kl_loss", "kl", 3),
    ("actor/entropy_loss", "entropy", 4),
    ("actor/grad_norm", "grad_norm", 1),
    ("timing_s/step", "seconds", 0),
)
ONLY_IF_ANY = ("reward/failures",)
VALIDATED = (
    ("val/nll", "nll"),
    ("val/rewards/accuracies", "accuracy"),
    ("val/accuracy", "accuracy"),
    ("val/margin", "margin"),
)
SHOWN_EVERY = 0.1  # seconds between two states of a bar
DRAWN_A_SECOND = 4  # pictures
LOGGERS = ("r1", "r1_core", "r1_rollout", "r1_rewards", "r1_data")
LINES_SHOWN, WIDTH_SHOWN = 6, 100  # of a prompt or response


class ConsoleReporter:
    """The `console` logger, which also owns the progress bars.

    On a terminal, lines scroll above the view and the bars. In a file or CI, only lines are printed.
    """

    def __init__(self, console: Console, *, step_lines: bool) -> None:
        self.console = console
        self._step_lines = step_lines or not console.is_terminal
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._total_steps = 0
        self._view: View | None = None
        self._answers: Sequence[Generation] = ()
        self._response: list[str] = []
        self._live = Live(
            console=console, get_renderable=self._draw, refresh_per_second=DRAWN_A_SECOND, vertical_overflow="crop"
        )

    def begin(self, step: int, total_steps: int, title: str = "") -> None:
        self._total_steps = total_steps
        processes.note("", step=step, steps=total_steps)
        self._view = View(title, step, total_steps)

    def _draw(self) -> Group:
        width, height = self.console.size
        picture = [] if self._view is None else [self._view.draw(width, height)]
        return Group(*picture, self._bars)

    def __enter__(self) -> "ConsoleReporter":
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def progress(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        task = self._bars.add_task(what, total=total)
        shown = 0.0
        try:
            for done, item in enumerate(items, start=1):
                yield item
                if (now := time.monotonic()) - shown > SHOWN_EVERY:  # a bar costs more than a row of text
                    self._bars.update(task, completed=done)
                    if self._view:
                        self._view.within = f"{done}/{total}"
                    shown = now
        finally:
            self._bars.remove_task(task)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Return a callback (done, total) that moves a progress bar and removes it at the end."""
        task = self._bars.add_task(what, total=None)

        def count(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total, visible=done < total)

        return count

    def stage(self, name: str) -> None:
        processes.note(name)
        if self._view:
            self._view.stage, self._view.within = name, ""

    def show_processes(self, line: str) -> None:
        if self._view:
            self._view.processes = line

    def show(self, generations: Sequence[Generation]) -> None:
        """Show some answers of the step that is logged next."""
        self._answers = generations

    def log(self, step: int, record: dict[str, float]) -> None:
        processes.note("", step=step)
        reward = record.get("reward/overall")
        if self._view:
            self._view.update(step, record, self._answers)
        if (reward is not None or "sft/samples" in record) and self._step_lines:
            width = self.console.width if self.console.is_terminal else None
            self._print(step_line(step, self._total_steps, record, width))
        if "val/reward_score" in record:
            parts = [f"{k[4:-7]} {v:.3f}" for k, v in record.items() if k.startswith("val/") and k.endswith("_reward")]
            self._print(f"validation at step {step}: reward {record['val/reward_score']:.3f}  " + "  ".join(parts))
            for line in self._response:
                self._print(line)

        found = [f"{name} {record[key]:.4f}" for key, name in VALIDATED if key in record]
        if found:
            self._print(f"validation at step {step}: {'  '.join(found)}")

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        row = rows[0]
        # A step's generations come before its record, and are read better after it.
        self._response = [
            *labelled("prompt", row["prompt"]),
            *labelled("response", row["response"]),
            *labelled("truth", row["ground_truth"]),
            f"  {'score':<10}{row['score']:.2f}",
        ]

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def step_line(step: int, total: int, record: dict[str, float], width: int | None = None) -> str:
    """Return the line of a step; less important numbers are dropped to fit `width` (None: no limit).

    Example: `step 3/140 reward 0.529 length 10.2 entropy 0.112 grad_norm 0.587 seconds 1.21`
    """
    shown = [one for one in STEP_COLUMNS if one[0] in record and (one[0] not in ONLY_IF_ANY or record[one[0]])]
    while True:
        numbers = [f"{label} {record[key]:.3g}" for key, label, _ in shown]
        line = "  ".join([f"step {step}/{total}", *numbers])
        least = max(rank for _, _, rank in shown)
        if width is None or len(line) <= width or not least:
            return line
        shown = [one for one in shown if one[2] < least]


def labelled(label: str, text: str) -> list[str]:
    lines = [visible(line) for line in text.strip().split("\n")]
    lines = [line if len(line) <= WIDTH_SHOWN else line[: WIDTH_SHOWN - 1] + "…" for line in lines]
    if len(lines) > LINES_SHOWN:
        lines = [*lines[: LINES_SHOWN - 1], f"… ({len(lines) - LINES_SHOWN + 1} more lines)"]
    return [f"  {label if place == 0 else '':<10}{line}" for place, line in enumerate(lines)]


class ConsoleHandler(logging.Handler):
    """Prints log messages through the console, above the progress bars."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self.console.print(self.format(record), style=style, highlight=False, markup=False, soft_wrap=True)


def configure_logging(console: Console) -> None:
    """Print r1's log messages through the console, and disable the progress bars of transformers."""
    handler = ConsoleHandler(console)
    for logger in map(logging.getLogger, LOGGERS):
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    transformers.utils.logging.disable_progress_bar()


@contextmanager
def logging_to(console: Console) -> Iterator[None]:
    """Configure logging inside the block, and restore it afterwards."""
    before = [(one, one.handlers, one.level, one.propagate) for one in map(logging.getLogger, LOGGERS)]
    bars = transformers.utils.logging.is_progress_bar_enabled()
    configure_logging(console)
    try:
        yield
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        if bars:
            transformers.utils.logging.enable_progress_bar()
