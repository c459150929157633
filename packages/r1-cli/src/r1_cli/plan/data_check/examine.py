"""Check all rows: media in worker processes, then ground truths by their rewards."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from r1_cli.build.rewards.dispatch import open_verifier
from r1_cli.build.rewards.ground_truths import GroundTruthReader
from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import RunConfig
from r1_cli.config.sources import training_sources, validation_sources
from r1_cli.plan.data_check.findings import Report
from r1_cli.train.types import Progress
from r1_data.check import Examined, Inspector, SourceRows, examine_all
from r1_data.conversations import Wanted
from r1_data.lengths import MANY, open_known
from r1_data.workers import Workers
from r1_rewards.reading.extract import ANSWER_FORMS, write_answer
from r1_rewards.sandbox.code_grading import assertion_problem
from r1_rewards.sandbox.code_tests import read_tests
from r1_rewards.sandbox.execution import Sandbox, SandboxError
from r1_rewards.types import RewardInput, Verifier
from r1_rewards.verifiers import BUILTINS, truth_is_answer

logger = logging.getLogger("r1")

Row = dict[str, Any]
BATCH = 256  # answers that a reward is given at a time


class SpacedRows(Sequence[tuple[str, Row]]):
    """At most `most` rows, evenly spaced from the first."""

    def __init__(self, rows: Sequence[tuple[str, Row]], most: int) -> None:
        self._rows, self._every = rows, max(1, -(-len(rows) // most))

    def __len__(self) -> int:
        return -(-len(self._rows) // self._every)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rows[index * self._every]


def open_all(config: RunConfig, wanted: Wanted | None = None) -> tuple[list[OpenSource], int]:
    """Return training, then validation sources, and the count of the former. `wanted` as in `open_sources`."""
    training = open_sources(training_sources(config.data), wanted)
    return training + open_sources(validation_sources(config.data), wanted), len(training)


def check(
    config: RunConfig,
    inspector: Inspector,
    workers: Workers | None,
    progress: Progress,
    *,
    strict: bool = False,
    write: Callable[[dict[str, str]], object] | None = None,
    most: int | None = None,
) -> Report:
    """Examine every row of every source.

    Args:
        inspector: for this process.
        workers: processes with the inspector, for media.
        strict: omitted rows are errors.
        write: called with every bad row.
        most: rows to examine of each source.
    """
    opened, training = open_all(config)
    if most is not None:
        opened = [replace(one, rows=SpacedRows(one.rows, most)) for one in opened]
    report = Report(config, opened, training, strict=strict, write=write)
    sources = [SourceRows(one.source.label, one.rows, one.reader) for one in opened]
    total = sum(len(one.rows) for one in opened)
    with ExitStack() as stack:
        known = open_known(config.data.cache_dir if total >= MANY else None, inspector.renderer)
        if known is not None:
            stack.enter_context(closing(known))
        for row in progress(examine_all(sources, inspector, workers, known), "rows", total):
            report.add_row(row)
    report.close(whole=most is None)
    check_answers(config, opened, report, progress)
    return report


def check_answers(config: RunConfig, opened: Sequence[OpenSource], report: Report, progress: Progress) -> None:
    """Score the ground truths, written as answers in several forms, with their own rewards.

    No credit for all forms, or an unreadable ground truth, is an error of a built-in reward, and a warning of a user's,
    which may expect another form or columns.
    """
    sources = [one.source for one in opened]
    truths = GroundTruthReader(config, sources)
    rewards = [truths.reward(source.name)[0] for source in sources]
    judged = [source for source, reward in zip(sources, rewards, strict=True) if reward]
    rows = [row for (index, _), row in report.ground_truths.items() if rewards[index]]
    if not judged or not rows:
        return
    readable: list[Examined] = []
    unclear: list[Examined] = []
    for row in rows:
        problem = truths.problem_of_row(opened[row.source], row.index, row.ground_truth or "")
        if problem is None and rewards[row.source] == "code":
            unclear.append(row)
        elif problem:
            report.add("reward", f"{row.id}: {problem}", row, "error")
        elif rewards[row.source] not in BUILTINS or truth_is_answer(rewards[row.source]):
            readable.append(row)
    for row, problem in _tests_without_assertions(unclear, progress):
        report.add("reward", f"{row.id}: code can judge no response: {problem}", row, "error")
    batches = [readable[start : start + BATCH] for start in range(0, len(readable), BATCH)]
    with ExitStack() as stack:
        verifier = open_verifier(config, judged, stack)
        for batch in progress(batches, "answers", len(batches)):
            for row in _refused(verifier, batch, opened, truths):
                reward = rewards[row.source]
                reason = f"{row.id}: {reward} gives the ground truth {str(row.ground_truth)[:60]!r} itself no credit"
                report.add("reward", reason, row, "error" if reward in BUILTINS else "warning")


def _tests_without_assertions(rows: Sequence[Examined], progress: Progress) -> Iterator[tuple[Examined, str]]:
    if not rows:
        return
    try:
        with Sandbox() as sandbox:
            for row in progress(rows, "tests", len(rows)):
                if problem := assertion_problem(read_tests(row.ground_truth or ""), sandbox):
                    yield row, problem
    except SandboxError as error:
        logger.warning("whether tests assert something was not checked: %s", error)


def _refused(
    verifier: Verifier, rows: list[Examined], opened: Sequence[OpenSource], truths: GroundTruthReader
) -> list[Examined]:
    for form in ANSWER_FORMS:
        inputs = [
            RewardInput(
                write_answer(form, row.ground_truth or ""),
                row.ground_truth or "",
                metadata=truths.columns(opened[row.source], row.index),
                source=opened[row.source].source.name,
            )
            for row in rows
        ]
        rows = [row for row, score in zip(rows, verifier(inputs), strict=True) if not score.is_correct]
    return rows
