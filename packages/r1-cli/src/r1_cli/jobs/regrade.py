"""`r1 eval --regrade`: grade stored answers again, with the same grader or another, without sampling."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from r1_cli.build.rewards.dispatch import open_verifier
from r1_cli.build.rows import open_sources
from r1_cli.checkpoint.folders import write_json
from r1_cli.config import RunConfig, load_config
from r1_cli.config.sources import Source, validation_sources
from r1_cli.jobs.evaluate import EvalOptions, report
from r1_cli.jobs.rows import SampledRows, score_again, with_score
from r1_cli.jobs.sample import digest_grader
from r1_cli.runs.evaluation.stored import EvaluatedSet, Evaluation, EvaluationError, read_evaluation
from r1_cli.runs.history import CONFIG_FILE
from r1_cli.runs.rows.choose import SampledAnswer, SampledGroup
from r1_cli.runs.rows.parts import IDENTITY_FILE, SETS, RowShard, SampleFolder, digest_identity
from r1_cli.runs.schema import SCHEMA, write_table
from r1_rewards.types import Score


@dataclass(frozen=True, slots=True)
class Grader:
    """Another grader than that of the sampled answers."""

    function: str
    kwargs: Mapping[str, object] = field(default_factory=dict)


def regrade(folder: Path, grader: Grader | None, options: EvalOptions) -> dict[str, float]:
    """Grade the answers of a folder of `r1 eval --output` again; print how many change, and the figures.

    The folder itself gets the new scores if the grader is the same and some answers could not be graded before.

    Args:
        grader: None: the same one.

    Raises:
        EvaluationError: rows have changed since they were sampled.
        ChoiceError: the answers are episodes.
        RewardSpecError: there is no such grader.
    """
    console, stored = Console(), read_evaluation(folder)
    config, _ = load_config([f"config={folder / CONFIG_FILE}"], command="eval")
    sources = [graded(source, grader) for source in validation_sources(config.data)]
    scored = dict(_score(stored, config, sources))
    changed = count_changes(stored, scored)
    answers = sum(len(scores) for scores in scored.values())
    console.print(f"{folder}: {changed:,} of {answers:,} answers get another score", highlight=False, soft_wrap=True)
    again = replace(stored, sets={name: _with_scores(one, scored) for name, one in stored.sets.items()})
    for source in sources:
        again.sets[source.name].about["grader"] = digest_grader(config, source)
    if options.output:
        write_copy(again, scored, options.output)
    elif grader is None and has_failures(stored):
        with SampleFolder(folder).locked(RowShard()):
            store_scores(again, scored, folder)
        console.print(f"{folder}: the new scores are stored", markup=False, highlight=False, soft_wrap=True)
    return report(stored.model, again, options, console)


def graded(source: Source, grader: Grader | None) -> Source:
    if grader is None:
        return source
    return replace(source, reward_function=grader.function, reward_function_kwargs=dict(grader.kwargs))


def _score(stored: Evaluation, config: RunConfig, sources: Sequence[Source]) -> Iterator[tuple[str, list[Score]]]:
    """Yield the scores of each group's answers, by its key."""
    groups = [group for one in stored.sets.values() for group in one.groups.values()]
    folder = SampleFolder(stored.path)
    rows = SampledRows(open_sources(sources), digest_identity(stored.identity), folder.tools())
    with ExitStack() as stack:
        verifier = open_verifier(config, sources, stack)
        if verifier.asking:
            raise EvaluationError("the reward asks a model, which --regrade does not load: name another --grader")
        found = {group.key: scores for group, scores in score_again(groups, rows, verifier)}
    if len(found) < len(groups):
        changed = f"{len(groups) - len(found)} of {len(groups)} rows have changed since they were sampled"
        raise EvaluationError(f"{stored.path}: {changed}; evaluate again")
    yield from found.items()


def count_changes(stored: Evaluation, scored: Mapping[str, Sequence[Score]]) -> int:
    """Return how many answers get another score, part or failure; the same numbers to the bit are no change."""
    groups = [group for one in stored.sets.values() for group in one.groups.values()]
    return sum(
        _told(answer) != _told(with_score(answer, score, None))
        for group in groups
        for answer, score in zip(group.answers, scored[group.key], strict=True)
    )


def has_failures(stored: Evaluation) -> bool:
    groups = [group for one in stored.sets.values() for group in one.groups.values()]
    return any(answer.failed for group in groups for answer in group.answers)


def _told(answer: SampledAnswer) -> tuple[str, str, str]:
    return repr(answer.score), repr(sorted(answer.parts.items())), answer.cause


def _with_scores(one: EvaluatedSet, scored: Mapping[str, Sequence[Score]]) -> EvaluatedSet:
    def again(group: SampledGroup) -> SampledGroup:
        pairs = zip(group.answers, scored[group.key], strict=True)
        return replace(group, answers=tuple(with_score(answer, score, None) for answer, score in pairs))

    return replace(one, about=dict(one.about), groups={row: again(group) for row, group in one.groups.items()})


def write_copy(again: Evaluation, scored: Mapping[str, Sequence[Score]], output: Path) -> None:
    """Write the folder again with the new scores. Raises EvaluationError if `output` is there."""
    if output.exists():
        raise EvaluationError(f"--output {output} is there already: name a new folder")
    shutil.copytree(again.path, output, ignore=shutil.ignore_patterns(".lock-*", "report.html"))
    store_scores(again, scored, output)


def store_scores(again: Evaluation, scored: Mapping[str, Sequence[Score]], path: Path) -> None:
    """Write new scores into a folder, and what graded them. If it is killed half-way, grade again."""
    folder = SampleFolder(path)
    write_json(path / IDENTITY_FILE, {**again.identity, SETS: {name: dict(s.about) for name, s in again.sets.items()}})
    blocks = {group.block for one in again.sets.values() for group in one.groups.values()}
    for block in sorted(blocks):
        if (table := folder.read(block)) is not None:
            write_table(with_scores_of(table, scored), folder.file(block))


def with_scores_of(table: pa.Table, scored: Mapping[str, Sequence[Score]]) -> pa.Table:
    """Return a block's table with the new scores."""
    places = zip(table["key"].to_pylist(), table["sample"].to_pylist(), strict=True)
    scores = [scored[key][sample] for key, sample in places]
    columns = {
        "score": [score.value for score in scores],
        "reward": [score.value for score in scores],
        "parts": [[*score.parts.items()] for score in scores],
        "extracted": [score.extracted for score in scores],
        "reason": [score.reason for score in scores],
        "failure": [f"{score.error.cause}: {score.error.message}" if score.error else None for score in scores],
    }
    for name, values in columns.items():
        table = table.set_column(
            table.schema.get_field_index(name), SCHEMA.field(name), pa.array(values, SCHEMA.field(name).type)
        )
    return table
