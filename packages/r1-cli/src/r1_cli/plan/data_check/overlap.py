"""Find rows that training shares with benchmarks: `r1 data check --against`, and a short check of each run."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import cast

from rich.console import Console

from r1_cli.build.rendering import open_workers
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.data import DataConfig
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.config.suites import suite_names
from r1_cli.runs.html import render_page
from r1_cli.runs.track.console import ConsoleReporter
from r1_data.check import SourceRows
from r1_data.overlap import Fingerprint, Fingerprinter, Overlap, find_overlaps, fingerprint_rows, shown_text
from r1_data.overlap.find import Kind
from r1_data.types import DataError, Example

VALIDATION = "val"  # in --against: the configuration's own validation rows
TITLES: dict[Kind, str] = {
    "text": "have the text of a training row",
    "numbers": "differ from a training row in numbers and names only",
    "pixels": "have a picture of a training row",
    "picture": "have a picture that looks like one of a training row",
}
SHOWN = 5  # pairs of each kind on the terminal
PAGED = 200  # pairs on the page
TEXT = 400  # characters of a text on the terminal
SECONDS = 1.0  # that a run's check takes at most
MOST = 5_000  # validation rows that it reads


@dataclass(frozen=True, slots=True)
class OverlapReport:
    training: Sequence[OpenSource]
    held_out: Sequence[OpenSource]
    pairs: Sequence[Overlap]
    problems: Sequence[str]  # rows and pictures that were not compared

    def texts(self, pair: Overlap) -> tuple[str, str]:
        """Return the texts of the training row and of the held-out row."""
        return _text(self.training, pair.training), _text(self.held_out, pair.held_out)

    def summary(self) -> Iterator[str]:
        trained = sum(len(one.rows) for one in self.training)
        for number, one in enumerate(self.held_out):
            found = Counter(pair.kind for pair in self.pairs if pair.held_out.source == number)
            total = len(one.rows)
            yield f"{one.source.name}: {found.total():,} of {total:,} rows overlap with {trained:,} training rows"
            yield from (f"  {found[kind]:,} {title}" for kind, title in TITLES.items() if found[kind])
        if self.problems:
            yield f"not compared: {len(self.problems):,} rows or pictures, such as {self.problems[0]}"

    def to_json(self, pair: Overlap) -> dict[str, object]:
        training, held_out = self.texts(pair)
        return {
            "kind": pair.kind,
            "share": round(pair.share, 3),
            "set": self.held_out[pair.held_out.source].source.name,
            "row": pair.held_out.id,
            "text": held_out,
            "training_row": pair.training.id,
            "training_text": training,
            "training_rows": pair.count,
        }


def check_overlap(
    config: RunConfig, against: Sequence[str], console: Console, *, conversations: bool, data_root: Path | None
) -> OverlapReport:
    """Compare the training rows with suites, files, or the configuration's own validation rows, and print the pairs.

    Raises:
        ConfigError, DataError: rows cannot be read, or a suite is unknown.
    """
    training = open_sources(training_sources(config.data), config.sft.wanted if conversations else None)
    held_out = [one for name in against for one in _open_held_out(config, name, data_root, conversations=conversations)]
    if not training:
        raise ConfigError([Problem("data.train_files", "names no rows to compare; set it", "null")])
    problems: list[str] = []
    with ExitStack() as stack:
        reporter = stack.enter_context(ConsoleReporter(console, step_lines=False))
        workers = stack.enter_context(open_workers(config, Fingerprinter()))

        def prints(opened: Sequence[OpenSource], what: str) -> Iterator[Fingerprint]:
            total = sum(len(one.rows) for one in opened)
            for one in reporter.progress(fingerprint_rows(_bare(opened), Fingerprinter(), workers), what, total):
                problems.extend([one.problem] if one.problem else [])
                yield one

        sizes = [sum(len(one.rows) for one in opened) for opened in (training, held_out)]
        pairs = find_overlaps(
            prints(training, "training rows"), prints(held_out, "rows"), index_training=sizes[0] < sizes[1]
        )
    report = OverlapReport(training, held_out, pairs, problems)
    show(console, report)
    return report


def _open_held_out(config: RunConfig, name: str, data_root: Path | None, *, conversations: bool) -> list[OpenSource]:
    if name == VALIDATION:
        if not (sources := validation_sources(config.data)):
            raise ConfigError([Problem("data.val_files", "names no rows to compare with; set it", "null")])
        return open_sources(sources, config.sft.wanted if conversations else None)
    is_suite = name.endswith((".yaml", ".yml")) or name.partition("/")[0].partition(":")[0] in suite_names()
    if not is_suite and any(sign in name for sign in "./@"):
        sources = validation_sources(DataConfig(val_files=name, allow_urls=config.data.allow_urls))
        try:
            opened = open_sources(sources)
            opened[0].reader(*opened[0].rows[0])
            return opened
        except DataError as error:
            try:
                return open_sources(sources, "any")
            except DataError:
                raise error from None
    from r1_cli.build.suites import apply_suites

    return open_sources(validation_sources(apply_suites(config, [name], None, data_root).data))


def _bare(opened: Sequence[OpenSource]) -> list[SourceRows]:
    """Return rows to be read without the prompts that are added to all of them."""
    bare = [replace(one, source=replace(one.source, format_prompt=None, system_prompt=None)) for one in opened]
    return [SourceRows(one.source.label, one.rows, _reader(one)) for one in bare]


def _reader(opened: OpenSource) -> Callable[[str, Mapping[str, object]], Example]:
    # A conversation has what is compared of an example: messages and media.
    return opened.reader if opened.wanted is None else cast("Callable[..., Example]", opened.conversation_reader)


def _text(opened: Sequence[OpenSource], row: Fingerprint) -> str:
    source = _bare(opened)[row.source]
    return shown_text(source.reader(*source.rows[row.index]))


def show(console: Console, report: OverlapReport) -> None:
    def say(line: str, style: str = "") -> None:
        console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    for line in report.summary():
        say(line)
    for kind, title in TITLES.items():
        of_kind = [pair for pair in report.pairs if pair.kind == kind]
        for number, pair in enumerate(of_kind[:SHOWN]):
            if not number:
                say(f"\n{len(of_kind):,} rows that {title}", "bold")
            training, held_out = (" ".join(text.split())[:TEXT] for text in report.texts(pair))
            more = f", and {pair.count - 1:,} more" if pair.count > 1 else ""
            say(f"  {pair.held_out.id}: {held_out}\n  {pair.training.id} ({pair.share:.2f}{more}): {training}\n")
        if len(of_kind) > SHOWN:
            say(f"  … and {len(of_kind) - SHOWN:,} more; --rows FILE writes all", "dim")


def write_pairs(report: OverlapReport, path: Path) -> None:
    """Write every pair with both texts, as JSON lines."""
    lines = (json.dumps(report.to_json(pair), ensure_ascii=False) + "\n" for pair in report.pairs)
    path.write_text("".join(lines), encoding="utf-8")


def render_pairs(report: OverlapReport) -> str:
    """Return a page with the first pairs, both texts of each side by side."""
    parts = ["<h1>r1 data check --against</h1>", f"<pre>{escape(chr(10).join(report.summary()))}</pre>"]
    for kind, title in TITLES.items():
        of_kind = [pair for pair in report.pairs if pair.kind == kind]
        if of_kind:
            parts.append(f"<h2>{len(of_kind):,} rows that {title}</h2><table>")
        for pair in of_kind[:PAGED]:
            cells = (f"<td><b>{escape(row.id)}</b><pre>{escape(text)}</pre></td>" for row, text in _sides(report, pair))
            parts.append(f"<tr><td>{pair.share:.2f}</td>{''.join(cells)}</tr>")
        parts += ["</table>"] if of_kind else []
    return render_page("r1 data check --against", "\n".join(parts))


def _sides(report: OverlapReport, pair: Overlap) -> Iterator[tuple[Fingerprint, str]]:
    training, held_out = report.texts(pair)
    yield pair.held_out, held_out
    yield pair.training, training


def find_shared_validation(
    training: Sequence[OpenSource],
    held_out: Sequence[OpenSource],
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, str]:
    """Return how many validation rows are training rows, and a line about it; "" if all were compared, and none is.

    It reads rows at random, for so many seconds at most, and decodes no picture.
    """
    begin, counts = clock(), [0, 0]

    def prints(opened: Sequence[OpenSource], side: int, until: float, most: int | None) -> Iterator[Fingerprint]:
        every = [(number, index) for number, one in enumerate(opened) for index in range(len(one.rows))]
        chosen = random.Random(0).sample(every, min(len(every), most or len(every)))
        found = fingerprint_rows(_bare(opened), Fingerprinter(decode=False), rows=chosen)
        for one in takewhile(lambda _: clock() - begin < until, found):
            counts[side] += 1
            yield one

    pairs = find_overlaps(
        prints(training, 0, seconds, None), prints(held_out, 1, seconds / 2, MOST), index_training=False
    )
    totals = [sum(len(one.rows) for one in opened) for opened in (training, held_out)]
    read = f"{counts[1]:,} of {totals[1]:,} compared with {counts[0]:,} of {totals[0]:,} training rows"
    if not pairs:
        return 0, "" if counts == totals else f"no validation row was found among the training rows ({read})"
    numbers = sum(pair.kind == "numbers" for pair in pairs)
    also = f", {numbers:,} of them with other numbers or names" if numbers else ""
    return len(pairs), f"{len(pairs):,} validation rows are training rows, too{also} ({read})"
