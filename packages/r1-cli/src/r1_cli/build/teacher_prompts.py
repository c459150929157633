"""The rows of a run as its teachers see them: which ones, how long, with a context or pictures of their own."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from r1_cli.build.rendering import build_renderer, open_workers
from r1_cli.build.rewards.served_model import ServedReading
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.distillation import POLICY, OneTeacherConfig
from r1_cli.models.families import find_value
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError, load_config
from r1_cli.train.groups.group import Group
from r1_data.dataset import Mixture
from r1_data.lengths import MANY, MANY_TEXTS, measure_all, open_known
from r1_data.messages import compile_format_prompt
from r1_data.render import Renderer
from r1_data.types import DataError, Example, Message, Prompt

Counter = Callable[[str], Callable[[int, int], None]]  # what is counted -> (done, in all)
LIMIT = "worker.teacher.max_prompt_length"


@dataclass(frozen=True, slots=True)
class TeacherPrompts:
    """Renders rows for a teacher that sees more than the policy."""

    key: str  # of its settings
    settings: OneTeacherConfig
    renderer: Renderer
    rewrite: Callable[[Example], Example]
    rows: Mixture

    def example(self, row: int) -> Example:
        """Return a row with the teacher's text and pictures. Raises DataError that names the row."""
        column = self.settings.image_key
        try:
            example = self.rows.example(row, column)
        except DataError as error:
            raise DataError(f"{error} ({self.key}.image_key)" if column else str(error)) from error
        return self.rewrite(example)

    def prompt_of(self, group: Group) -> Prompt:
        if group.row < 0:
            raise DataError(f"{group.prompt.id}: its row is unknown, so that the teacher's prompt cannot be rendered")
        return self.renderer.render(self.example(group.row))


@dataclass(frozen=True, slots=True)
class TeacherRows:
    longest: int  # tokens of a prompt; 0 if no row is this teacher's
    prompts: TeacherPrompts | None = None  # None: it sees the policy's
    reading: ServedReading | None = None  # of a teacher on servers


def open_teacher_rows(
    config: RunConfig, model: ModelFiles, rows: Mixture, counter: Counter | None = None
) -> dict[str, TeacherRows]:
    """Measure the prompts of every teacher, by the key of its settings.

    Args:
        rows: the policy's training rows, checked.

    Raises:
        ConfigError: a context does not parse, or limits of pixels do not fit the processor's.
        DataError: names a row that a teacher cannot be shown, and what it lacks.
        ModelError: a teacher has too few positions.
    """
    found = {}
    for key, one in config.worker.teacher.every.items():
        if not one.privileged:
            found[key] = TeacherRows(max((part.summary.longest for part in rows.parts), default=0))
        else:
            prompts = build_teacher_prompts(config, model, rows, key, one)
            found[key] = TeacherRows(_measure(config, prompts, counter), prompts)
        _require_positions(config, model, key, one, found[key].longest)
    return found


def build_teacher_prompts(
    config: RunConfig, model: ModelFiles, rows: Mixture, key: str, settings: OneTeacherConfig
) -> TeacherPrompts:
    pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    own = config.data.model_copy(update={name: value for name, value in pixels.items() if value is not None})
    try:
        renderer = build_renderer(config.model_copy(update={"data": own}), model)
    except DataError as error:
        raise ConfigError([Problem(key, f"its pictures cannot be resized: {error}")]) from error
    rewrite: Callable[[Example], Example] = lambda example: example  # noqa: E731
    if settings.context:
        try:
            template = compile_format_prompt(Path(settings.context).read_text(encoding="utf-8"), settings.context)
        except DataError as error:
            raise ConfigError([Problem(f"{key}.context", str(error))]) from error
        rewrite = partial(rewrite_prompt if settings.style == "rewrite" else put_before, template.render)
    return TeacherPrompts(key, settings, renderer, rewrite, rows)


def _measure(config: RunConfig, prompts: TeacherPrompts, counter: Counter | None) -> int:
    """Return the tokens of the teacher's longest prompt. Raises DataError that names a row."""
    total, limit, longest = len(prompts.rows), config.worker.teacher.max_prompt_length, 0
    progress = counter(f"checking the prompts of {prompts.key}") if counter else None
    with ExitStack() as stack:
        known = open_known(config.data.cache_dir if total >= MANY else None, prompts.renderer)
        if known is not None:
            stack.enter_context(closing(known))
        workers = stack.enter_context(open_workers(config, prompts.renderer)) if total >= MANY else None
        examples, many = _own_examples(config, prompts), total >= MANY_TEXTS
        for row, length in measure_all(examples, prompts.renderer, workers, known, many=many):
            if isinstance(length, DataError):
                raise length
            if limit is not None and length > limit:
                name = prompts.rows.example(row).id
                raise DataError(
                    f"{name}: the prompt of {prompts.key} has {length:,} tokens, {LIMIT} is {limit:,}: raise it, or "
                    "shorten what the teacher sees"
                )
            longest = max(longest, length)
            if progress is not None:
                progress(row + 1, total)
    return longest


def _own_examples(config: RunConfig, prompts: TeacherPrompts) -> Iterator[tuple[int, Example | DataError]]:
    """Yield the rows whose data source has this teacher."""
    teacher = config.worker.teacher
    for row in range(len(prompts.rows)):
        try:
            if teacher.sources and teacher.of(source_of(prompts.rows.example(row))) is not prompts.settings:
                continue
            yield row, prompts.example(row)
        except DataError as error:
            yield row, error


def source_of(example: Example) -> str:
    """Return what `Group.data_source` is of the example's prompt."""
    return str(example.metadata.get("data_source", example.source))


def _require_positions(config: RunConfig, model: ModelFiles, key: str, one: OneTeacherConfig, prompt: int) -> None:
    """Raise ModelError if a loaded teacher knows fewer positions than its prompts and the answers may have."""
    path = one.model.model_path
    if path is None or not prompt or (path != POLICY and not Path(path).is_dir()):  # a hub's is not looked at
        return
    policy = path == POLICY
    read = model.config if policy else load_config(path, trust_remote_code=one.model.trust_remote_code, key=key)
    known = find_value(read.get_text_config(), "max_position_embeddings")
    longest = prompt + config.data.max_response_length
    if known and longest > known:
        raise ModelError(
            f"{key}.model.model_path={path}: it knows {known:,} positions, and its longest prompt with an answer may "
            f"have {longest:,} tokens: lower data.max_response_length, or shorten what the teacher sees"
        )


# --- the teacher's text -----------------------------------------------------------------------------------------------


def rewrite_prompt(render: Callable[..., str], example: Example) -> Example:
    """Return the example with the text of its last user message rewritten by `render(content=, answer=, columns…)`.

    Pictures stay, before the text. Raises DataError that names the row.
    """
    place, message, parts = _last_question(example)
    text = _render(render, example, parts)
    media = [part for part in parts if part["type"] != "text"]
    changed = {**message, "content": [*media, {"type": "text", "text": text}] if media else text}
    return replace(example, messages=[*example.messages[:place], changed, *example.messages[place + 1 :]])


def put_before(render: Callable[..., str], example: Example) -> Example:
    """Return the example with the text in a system message before all others, or at the head of the one that it has.

    Raises DataError that names the row.
    """
    _, _, parts = _last_question(example)
    text = _render(render, example, parts)
    first, *rest = example.messages
    if first["role"] != "system":
        return replace(example, messages=[{"role": "system", "content": text}, first, *rest])
    content = first["content"]
    joined = f"{text}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": f"{text}\n\n"}, *content]
    return replace(example, messages=[{**first, "content": joined}, *rest])


def _last_question(example: Example) -> tuple[int, Message, list[Any]]:
    """Return the place of the last user message, the message, and its parts."""
    place = max((i for i, one in enumerate(example.messages) if one["role"] == "user"), default=-1)
    if place < 0:
        raise DataError(f"{example.id}: the prompt has no user message, which the teacher's context reads")
    message: Message = example.messages[place]
    content = message["content"]
    return place, message, content if isinstance(content, list) else [{"type": "text", "text": content}]


def _render(render: Callable[..., str], example: Example, parts: list[Any]) -> str:
    content = "".join(part["text"] for part in parts if part["type"] == "text")
    try:
        return render(**{**example.metadata, "content": content, "answer": example.ground_truth})
    except Exception as error:  # a template may call any method of the row's values
        raise DataError(f"{example.id}: the teacher's context fails on this row ({error})") from error
