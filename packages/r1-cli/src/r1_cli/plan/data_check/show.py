"""One row as the engine and the learner receive it."""

from collections.abc import Iterator
from typing import Any

from r1_cli.build.demonstrations import build_conversation_renderer
from r1_cli.build.rendering import build_renderer, open_rendering
from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.models.files import open_model
from r1_cli.plan.data_check.examine import open_all
from r1_cli.plan.data_check.page import mark_trained
from r1_data.prefetch import start_rendering
from r1_data.types import DataError, Prompt
from r1_data.workers import WorkerDied


def describe_row(config: RunConfig, wanted: str, *, validation: bool, conversations: bool = False) -> str:
    """Describe a row's columns, messages, media, text and tokens.

    Args:
        wanted: the row's number, counted from 1 over all sources, or its id (`train.parquet:12`).
        conversations: rows are those of `r1 sft`.

    Raises:
        DataError, ModelError: there is no such row; the model's processor cannot be read.
    """
    opened, training = open_all(config, config.sft.wanted if conversations else None)
    one, index = _find(opened[training:] if validation else opened[:training], wanted)
    row_id, row = one.rows[index]
    lines = [f"row       {row_id}", f"source    {one.source.name} ({one.detected.format or 'columns as set'})"]
    lines += [f"  {name}: {_brief(value)}" for name, value in row.items()]
    if conversations:
        return "\n".join([*lines, *_conversation(config, one, index)])
    try:
        example = one.reader(row_id, row)
        lines += [
            "messages",
            *(f"  {message['role']}: {_brief(message['content'], 400)}" for message in example.messages),
        ]
        with open_rendering(config, build_renderer(config, open_model(config))) as rendering:
            prompt = start_rendering(example, rendering.renderer, rendering.workers).result()
    except (DataError, WorkerDied) as error:
        return "\n".join([*lines, f"cannot be used: {error}"])
    return "\n".join([*lines, *_rendered(prompt, config.data.max_prompt_length)])


def _conversation(config: RunConfig, one: OpenSource, index: int) -> Iterator[str]:
    renderer = build_conversation_renderer(config, build_renderer(config, open_model(config)))
    try:
        conversation = one.conversation_reader(*one.rows[index])
        surveys = renderer.survey(conversation)
        yield "messages"
        for message in conversation.messages + (conversation.rejected or []):
            yield f"  {message['role']}: {_brief(message['content'], 400)}"
        renderer.load(conversation)
    except DataError as error:
        yield f"cannot be used: {error}"
        return
    for part in surveys:
        over = f", over data.max_length={config.data.max_length}" if part.tokens > config.data.max_length else ""
        yield f"tokens    {part.tokens}{over}, of which {part.trained_tokens} are trained"
        yield "text, with [[ ]] around what is trained"
        yield mark_trained(part, str, "[[", "]]", limit=len(part.text))


def _rendered(prompt: Prompt, limit: int) -> Iterator[str]:
    length, for_media = len(prompt.token_ids), len(prompt.token_ids) - len(prompt.engine_token_ids)
    over = f", over data.max_prompt_length={limit}" if length > limit else ""
    yield f"answer    {prompt.ground_truth!r}"
    yield f"tokens    {length}{over}" + (f", of which media add {for_media}" if for_media else "")
    yield f"positions {list(prompt.position_ids.shape)}, last {prompt.position_ids[:, -1].tolist()}"
    for number, image in enumerate(prompt.images, start=1):
        yield f"image {number}   {image.width} × {image.height}"
    for number, video in enumerate(prompt.videos, start=1):
        frames, _, height, width = video.shape
        yield f"video {number}   {width} × {height}, {frames} frames"
    for name, tensor in prompt.model_inputs.items():
        yield f"input     {name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    yield f"text\n{prompt.text}"


def _find(opened: list[OpenSource], wanted: str) -> tuple[OpenSource, int]:
    if wanted.isdecimal():
        number = int(wanted) - 1
        for one in opened:
            if 0 <= number < len(one.rows):
                return one, number
            number -= len(one.rows)
    else:
        for one in opened:
            for index in range(len(one.rows)):
                if one.rows[index][0] == wanted:
                    return one, index
    total = sum(len(one.rows) for one in opened)
    raise DataError(f"there is no row {wanted}; there are {total:,}, and ids are written like train.parquet:12")


def _brief(value: Any, limit: int = 160) -> str:
    text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
