"""What a user sees on the terminal: progress bars, one line a step, validation lines."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Item = TypeVar("Item")

STEP_COLUMNS = {
    "reward/overall": "reward",
    "response_length/mean": "length",
    "actor/kl_loss": "kl",
    "actor/entropy_loss": "entropy",
    "actor/grad_norm": "grad_norm",
    "timing_s/step": "seconds",
}


class ConsoleReporter:
    """Shows a run as it goes. It is the `console` logger and owns the progress bars.

    On a terminal the bars stay at the bottom and lines scroll above them; elsewhere (a file, CI) only lines appear.
    """

    def __init__(self, console: Console, *, step_lines: bool) -> None:
        self.console = console
        self._step_lines = step_lines
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._total_steps = 0
        self._answer = ""

    def begin(self, step: int, total_steps: int) -> None:
        """Show the bar of the whole run."""
        self._total_steps = total_steps
        self._steps = self._bars.add_task("training", total=total_steps, completed=step, note="")

    def __enter__(self) -> "ConsoleReporter":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def progress(self, items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
        """Yield `items` unchanged under a bar that goes away when they end."""
        task = self._bars.add_task(what, total=total, note="")
        try:
            for item in items:
                yield item
                self._bars.advance(task)
        finally:
            self._bars.remove_task(task)

    def counter(self, what: str) -> Callable[[int, int], None]:
        """Return a callback (done, total) that moves a bar of its own, which goes away when all is done."""
        task = self._bars.add_task(what, total=None, note="")

        def count(done: int, total: int) -> None:
            self._bars.update(task, completed=done, total=total, visible=done < total)

        return count

    def log(self, step: int, record: dict[str, float]) -> None:
        reward = record.get("reward/overall")
        self._bars.update(self._steps, completed=step, note="" if reward is None else f"reward {reward:.3f}")
        if reward is not None and self._step_lines:
            shown = [f"{label} {record[key]:.4g}" for key, label in STEP_COLUMNS.items() if key in record]
            self._say(f"step {step}/{self._total_steps}  " + "  ".join(shown))
        if "val/reward_score" in record:
            parts = [f"{k[4:-7]} {v:.3f}" for k, v in record.items() if k.startswith("val/") and k.endswith("_reward")]
            self._say(f"validation at step {step}: reward {record['val/reward_score']:.3f}  " + "  ".join(parts))
            self._say(self._answer)

    def log_generations(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Whole answers belong in `generations.jsonl`; a terminal shows the first, shortened."""
        row = rows[0]
        truth = f"ground truth {row['ground_truth'][:60]!r}, score {row['score']:.2f}"
        # A step's generations come before its record, and are read better after it.
        self._answer = f"  an answer: {row['response'][:200]!r} ({truth})"

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bars.stop()


class ConsoleHandler(logging.Handler):
    """Prints log messages through the console, so that they do not tear the progress bars."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        style = "yellow" if record.levelno >= logging.WARNING else None
        self.console.print(self.format(record), style=style, highlight=False, markup=False, soft_wrap=True)


def configure_logging(console: Console) -> None:
    """Send r1's own messages through the console, and silence the progress bars of others."""
    handler = ConsoleHandler(console)
    for name in ("r1", "r1_core", "r1_rollout", "r1_rewards", "r1_data"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False
    transformers.utils.logging.disable_progress_bar()
