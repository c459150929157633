"""`r1 rows`: write rows of training that are chosen from sampled answers."""

import io
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from r1_cli.build.rows import OpenSource, open_sources
from r1_cli.config import ConfigError, Problem, load_config
from r1_cli.config.sources import training_sources
from r1_cli.runs.history import CONFIG_FILE, JsonObject
from r1_cli.runs.rows.choose import (
    Choice,
    ChoiceError,
    Chosen,
    SampledAnswer,
    SampledGroup,
    choose,
    control,
    statistics,
)
from r1_cli.runs.rows.parts import SampleFolder, digest_identity, key_of
from r1_cli.runs.rows.recorded import read_groups
from r1_cli.runs.track.console import configure_logging
from r1_data.formats import detect_columns
from r1_data.messages import FORMATTED
from r1_data.references import is_pil
from r1_data.turns.tool_prompt import ToolPrompt
from r1_data.types import DataError, Example, MediaReference, Row, Video, is_json, json_columns
from r1_rewards.load import load
from r1_rewards.types import RewardInput, Score, Verifier

log = logging.getLogger("r1")

AT_ONCE = 64  # groups that are scored in one call
ROW_GROUP = 1000  # rows to a group of a parquet file
MARKERS = {"image": "<image>", "image_url": "<image>", "video": "<video>", "video_url": "<video>"}

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class RowsOptions:
    output: Path
    least: float | None = None  # score from which an answer is right
    with_control: bool = False
    reward: str | None = None  # scores the answers again, with its keywords
    reward_kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The rows that were sampled, as they are now."""

    opened: Sequence[OpenSource]
    identity: str  # digest of what they were sampled with
    tools: Mapping[str, ToolPrompt]  # what showed tools in the prompts of each source of episodes

    def __call__(self, wanted: Mapping[str, Item]) -> Iterator[tuple[Item, Example, Row, OpenSource]]:
        """Yield the items of the rows that have not changed, by the key of their group, with the rows."""
        for one in self.opened:
            for index in range(len(one.rows)):
                try:
                    row_id, row = one.rows[index]
                    example = one.reader(row_id, row)
                except DataError:
                    continue
                if (item := wanted.get(key_of(example, self.identity))) is not None:
                    show = self.tools.get(example.source)
                    yield item, show(example) if show else example, row, one


def write_chosen(folders: Sequence[Path], choice: Choice, options: RowsOptions) -> None:
    """Choose rows from the answers in `folders` and write them to a .parquet or .jsonl file.

    Raises:
        ChoiceError: nothing, or next to nothing, is left.
        ConfigError, DataError: a folder or the rows that were sampled cannot be read.
        RewardSpecError: there is no such reward.
    """
    if options.output.suffix not in (".parquet", ".jsonl"):
        raise ConfigError([Problem("--output", "must end in .parquet or .jsonl", str(options.output))])
    console = Console()
    configure_logging(console)
    groups = read_groups(folders, options.least)
    config, _ = load_config([f"config={folders[0] / CONFIG_FILE}"], command="rows")
    folder = SampleFolder(folders[0])
    rows = SampledRows(open_sources(training_sources(config.data)), digest_identity(folder.identity()), folder.tools())
    if options.reward is not None:
        with load(options.reward, dict(options.reward_kwargs), failure_policy="drop") as verifier:
            groups = rescore(groups, rows, verifier, options.least)
    chosen = choose(groups, choice)
    write(chosen, rows, choice, options.output)
    told = f"{options.output}: {len(chosen)} rows of {len({id(one.group) for one in chosen})} prompts, of {len(groups)}"
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    for line in describe_rest(groups, choice):
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if options.with_control:
        path = options.output.with_name(f"{options.output.stem}.control{options.output.suffix}")
        by_lot = control(groups, choice, len(chosen))
        write(by_lot, rows, choice, path)
        console.print(f"{path}: {len(by_lot)} rows by lot", markup=False, highlight=False, soft_wrap=True)


def describe_rest(groups: Sequence[SampledGroup], choice: Choice) -> Iterator[str]:
    rates = [group.pass_rate for group in groups]
    answers = [answer for group in groups for answer in group.answers]
    yield f"{sum(rate == 0 for rate in rates)} prompts have no right answer, {rates.count(1.0)} only right ones"
    if failed := sum(answer.failed for answer in answers):
        yield f"{failed} of {len(answers)} answers could not be scored, and are not chosen"
    if cut := sum(answer.cut for answer in answers):
        left = "chosen like others" if choice.keep_cut or choice.kind == "rates" else "not chosen (--keep-cut)"
        yield f"{cut} of {len(answers)} answers were cut by data.max_response_length, and are {left}"


def write(chosen: Sequence[Chosen], rows: SampledRows, choice: Choice, path: Path) -> None:
    by_key: dict[str, list[Chosen]] = {}
    for one in chosen:
        by_key.setdefault(one.group.key, []).append(one)
    missing = set(by_key)

    def each() -> Iterator[Row]:
        for those, example, row, source in rows(by_key):
            missing.discard(those[0].group.key)
            for one in those:
                yield to_row(one, choice, example, row, source)
        if len(missing) == len(by_key):
            raise ChoiceError("none of the rows is as it was sampled: run r1 sample again")

    write_rows(each(), path)
    if missing:
        log.warning("%d rows have changed since they were sampled, and are left out", len(missing))


def write_rows(rows: Iterator[dict[str, Any]], output: Path) -> None:
    """Write rows as JSON lines or parquet, atomically. Raises ConfigError if JSON cannot hold them."""
    draft = output.with_name(f".{output.name}.draft")
    if output.suffix == ".jsonl":
        try:
            with draft.open("w", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        except TypeError as error:
            draft.unlink()
            raise ConfigError(
                [Problem("--output", f"JSON cannot hold these rows ({error}): write .parquet")]
            ) from error
    else:
        write_parquet(rows, draft)
    draft.rename(output)


def write_parquet(rows: Iterator[dict[str, Any]], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = []
    while group := list(islice(rows, ROW_GROUP)):
        tables.append(pa.Table.from_pylist(group))
    schema = pa.unify_schemas([table.schema for table in tables], promote_options="permissive")
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for table in tables:
            # Not `cast`, which makes invalid arrays of lists of structs with a field of nulls (pyarrow 25).
            same = table.schema.equals(schema)
            writer.write_table(table if same else pa.Table.from_pylist(table.to_pylist(), schema=schema))


# --- scores -----------------------------------------------------------------------------------------------------------


def rescore(
    groups: Sequence[SampledGroup], rows: SampledRows, verifier: Verifier, least: float | None
) -> list[SampledGroup]:
    """Return the groups whose rows have not changed, with the scores that `verifier` gives."""
    return [with_scores(group, iter(scores), least) for group, scores in score_again(groups, rows, verifier)]


def score_again(
    groups: Sequence[SampledGroup], rows: SampledRows, verifier: Verifier
) -> Iterator[tuple[SampledGroup, list[Score]]]:
    """Yield the groups whose rows have not changed, with the scores that `verifier` gives."""
    if any(answer.turns for group in groups for answer in group.answers):
        raise ChoiceError("answers of episodes cannot be scored again: their environments have")
    sampled = rows({group.key: group for group in groups})
    while those := list(islice(sampled, AT_ONCE)):
        scores = iter(verifier([one for group, example, *_ in those for one in to_inputs(group, example)]))
        for group, *_ in those:
            yield group, [*islice(scores, len(group.answers))]


def to_inputs(group: SampledGroup, example: Example) -> list[RewardInput]:
    given = partial(
        RewardInput,
        ground_truth=example.ground_truth,
        prompt=group.prompt,
        metadata=json_columns(example.metadata),
        messages=example.messages if is_json(example.messages) else (),
        images=[one for one in example.media if not isinstance(one, Video)],
        source=example.source,
    )
    return [given(response=answer.text, response_length=answer.tokens) for answer in group.answers]


def with_scores(group: SampledGroup, scores: Iterator[Score], least: float | None) -> SampledGroup:
    return replace(group, answers=tuple(with_score(one, next(scores), least) for one in group.answers))


def with_score(answer: SampledAnswer, score: Score, least: float | None) -> SampledAnswer:
    cause = score.error.cause if score.error else ""
    right = score.is_correct if least is None else not cause and score.value >= least
    return replace(answer, score=score.value, right=right, cause=cause, parts=score.parts)


# --- rows -------------------------------------------------------------------------------------------------------------


def to_row(one: Chosen, choice: Choice, example: Example, row: Row, source: OpenSource) -> Row:
    if choice.kind == "rates":
        return {**row, **statistics(one.group)}
    prompt, media = as_text(example.messages), media_columns(example, row, source)
    about: Row = {"prompt_id": one.group.prompt_id, "source": one.group.source, "pass_rate": one.group.pass_rate}
    about |= {"tools": json.dumps(example.tools)} if example.tools else {}
    about |= {FORMATTED: True} if source.source.format_prompt else {}
    if one.chosen is None:
        raise ValueError("a row of sft or pairs needs an answer")
    answer, pictures = as_text(one.chosen.messages), [*one.chosen.pictures]
    if one.rejected is not None and (pictures or one.rejected.pictures):
        raise ChoiceError("episodes whose turns show pictures cannot be compared as pairs: write them --as sft")
    if pictures:
        shown = [{"bytes": read_picture(path), "path": None} for path in pictures]
        media["images"] = media.get("images", []) + shown
    if one.rejected is None:
        return {"messages": [*prompt, *answer], **media, "score": one.chosen.score, **about}
    scores = {"score_chosen": one.chosen.score, "score_rejected": one.rejected.score}
    return {"prompt": prompt, "chosen": answer, "rejected": as_text(one.rejected.messages), **media, **scores, **about}


def as_text(messages: Iterable[Mapping[str, object]]) -> list[JsonObject]:
    """Return messages whose content is text, with markers in the places of pictures and videos."""
    return [{**message, "content": _text(message.get("content"))} for message in messages]


def _text(content: object) -> str:
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return "".join(MARKERS.get(str(part.get("type")), str(part.get("text", ""))) for part in parts)


def media_columns(example: Example, row: Row, source: OpenSource) -> dict[str, Any]:
    """Return the columns of a row's media: pictures as bytes or path, videos as the row has them."""
    if not example.media:
        return {}
    columns = detect_columns(row, source.reader.columns, explicit=True)
    found: dict[str, Any] = {"images": [_picture(one) for one in example.media if not isinstance(one, Video)]}
    if any(isinstance(one, Video) for one in example.media):
        found["videos"] = row.get(columns.videos)
    return found


def read_picture(path: Path) -> bytes:
    """Raises ChoiceError if the folder of the samples has lost it."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ChoiceError(f"{path} is missing, a picture that a turn of an episode showed") from error


def _picture(reference: MediaReference) -> JsonObject:
    if isinstance(reference, bytes):
        return {"bytes": bytes(reference), "path": None}
    if is_pil(reference):
        content = io.BytesIO()
        reference.save(content, format="PNG")
        return {"bytes": content.getvalue(), "path": None}
    path = reference.absolute() if isinstance(reference, Path) else reference
    return {"bytes": None, "path": str(path)}
