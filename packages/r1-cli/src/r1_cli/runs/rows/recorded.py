"""Read the groups of folders of `r1 sample`."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from r1_cli.config import ConfigError, Problem
from r1_cli.runs.conversation import seen_messages
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import FORKED, MEDIA, RunReader
from r1_cli.runs.rows.choose import SampledAnswer, SampledGroup
from r1_cli.runs.rows.parts import IDENTITY_FILE, SampleFolder

COLUMNS = ("group", "sample", "prompt_id", "source", "answer", "tokens", "score", "parts", "failure", "finish_reason",
           "turns", "stop_reason", "media", "key", "step", "prompt_tokens", "prompt", "sampled")  # fmt: skip


def read_groups(folders: Sequence[Path], least: float | None = None) -> list[SampledGroup]:
    """Return the groups of all folders, by block and row; one that is in two folders, once.

    Args:
        least: score from which an answer is right; None: by the reward's part `accuracy`, else by a score above 0.5.

    Raises:
        ConfigError: a folder is not of `r1 sample`, or two were sampled otherwise.
    """
    found: dict[str, SampledGroup] = {}
    identity: JsonObject | None = None
    for path in folders:
        if not (path / IDENTITY_FILE).is_file():
            message = f"is no folder of r1 sample: there is no {IDENTITY_FILE} in it"
            raise ConfigError([Problem("FOLDER", message, str(path))])
        if identity is None:
            identity = SampleFolder(path).identity()
        elif identity != SampleFolder(path).identity():
            raise ConfigError([Problem("FOLDER", f"was sampled otherwise than {folders[0]}", str(path))])
        for group in _groups(path, least):
            found.setdefault(group.key, group)
    return [*found.values()]


def _groups(folder: Path, least: float | None) -> Iterator[SampledGroup]:
    for path in RunReader(folder).sample_paths("sample"):
        try:
            table = pq.read_table(path, columns=[*COLUMNS], partitioning=None)
        except (OSError, pa.ArrowException) as error:
            raise ConfigError(
                [Problem("FOLDER", f"{path.name} is damaged: run r1 sample again", str(folder))]
            ) from error
        for name in ("tokens", "prompt_tokens"):
            lengths = pc.fill_null(pc.list_value_length(table[name]), 0)
            table = table.set_column(COLUMNS.index(name), name, lengths)
        rows = table.to_pylist()
        for _, of_group in groupby(rows, key=lambda row: row["group"]):
            yield to_group([row for row in of_group if row["stop_reason"] != FORKED], folder / MEDIA, least)


def to_group(rows: Sequence[JsonObject], media: Path, least: float | None = None) -> SampledGroup:
    first = rows[0]
    answers = tuple(to_answer(row, media, least) for row in rows)
    place = first["step"], first["group"], first["prompt_tokens"], first["prompt"]
    return SampledGroup(first["prompt_id"], first["source"], first["key"], answers, *place)


def to_answer(row: JsonObject, media: Path, least: float | None) -> SampledAnswer:
    score: float = math.nan if row["score"] is None else row["score"]
    parts = dict(row["parts"] or ())
    cause = (row["failure"] or "").partition(":")[0] or ("non_finite" if math.isnan(score) else "")
    judged: float = parts.get("accuracy", score)
    messages, pictures = seen_messages(row)
    return SampledAnswer(
        sample=row["sample"],
        text=row["answer"] or "",
        tokens=row["tokens"] if row["sampled"] is None else sum(row["sampled"]),
        score=score,
        right=not cause and bool(judged > 0.5 if least is None else score >= least),
        cut=row["finish_reason"] == "length",
        cause=cause,
        turns=tuple(messages),
        pictures=tuple(media / name for name in pictures),
        parts=parts,
    )
