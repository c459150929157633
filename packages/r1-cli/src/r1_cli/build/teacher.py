"""Build the teachers that a run distils from: in the learner, in this process, or on servers."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from r1_cli.build.rendering import build_renderer
from r1_cli.build.rewards.connect import padded_batching
from r1_cli.build.rewards.frozen_model import FrozenReading, open_frozen
from r1_cli.build.rewards.own_models import LearnerReading
from r1_cli.build.rewards.served_model import ServedReading
from r1_cli.build.teacher_model import OTHER, PROBES, require_same_tokenizer
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.distillation import POLICY, OneTeacherConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError, load_tokenizer
from r1_cli.train.groups.group import Group
from r1_cli.train.teaching import AdvantageTeacher, LossTeacher, TeacherModel, Teachers, TopTeacher
from r1_cli.train.types import Policy, Teacher
from r1_core.advantages.distillation import Distillation
from r1_data.dataset import Mixture
from r1_data.messages import compile_format_prompt
from r1_data.types import DataError, Example, Message, Prompt
from r1_rewards.services.endpoint import RequestFailed
from r1_rewards.types import RewardSpecError


def build_teacher(
    config: RunConfig, hardware: Hardware, model: ModelFiles, learner: Policy, prompts: Mixture
) -> Teacher:
    """Open the teachers of a run, whose training rows are `prompts`.

    Raises:
        ConfigError: a server's address is invalid, or a context does not parse.
        ModelError: a model cannot be loaded, or has other tokens than the policy.
    """
    distillation = config.algorithm.distillation
    if distillation.form == "loss" and not distillation.topk:
        return LossTeacher()
    opened: dict[int, TeacherModel] = {
        id(one): _open(config, hardware, model, learner, prompts, key, one)
        for key, one in config.worker.teacher.every.items()
    }

    def find(source: str) -> TeacherModel | None:
        settings = config.worker.teacher.of(source)
        return None if settings is None else opened[id(settings)]

    temperature, share = config.worker.rollout.temperature, config.worker.teacher.failure_share
    teachers = Teachers(learner, find, temperature, share, distillation.topk or 0)
    if distillation.form == "loss":
        return TopTeacher(teachers, distillation.task_reward)
    return AdvantageTeacher(teachers, Distillation(distillation.coef, distillation.clip, distillation.task_reward))


def _open(
    config: RunConfig,
    hardware: Hardware,
    model: ModelFiles,
    learner: Policy,
    prompts: Mixture,
    key: str,
    settings: OneTeacherConfig,
) -> TeacherModel:
    temperature, path = config.worker.rollout.temperature, settings.model.model_path
    rewrite = _prompts(config, model, prompts, key, settings) if settings.privileged else lambda group: group.prompt
    topk = config.algorithm.distillation.topk or 0
    reading: ServedReading | LearnerReading | FrozenReading
    if settings.urls:
        reading = open_servers(settings, key, model, topk)
    elif path == POLICY or path == config.worker.teacher.in_learner:
        if not settings.privileged:
            return TeacherModel(None, rewrite)
        reading = LearnerReading(learner, "teacher", temperature)
    else:
        name = f"{key}.model.model_path"
        reading = open_frozen(path or "", name, config, hardware, model, padded_batching(config))
    return TeacherModel(reading, rewrite, partial(reading.read_top, count=topk, temperature=temperature))


def open_servers(settings: OneTeacherConfig, key: str, model: ModelFiles, topk: int) -> ServedReading:
    """Raises ConfigError for an invalid address, ModelError if a server has other tokens or lists too few."""
    try:
        reading = ServedReading(settings.urls or "", served_name=settings.served_name, token_env=settings.token_env)
    except RewardSpecError as error:
        raise ConfigError([Problem(f"{key}.urls", str(error), settings.urls)]) from error
    require_same_tokens_on_servers(reading, f"{key}.urls={settings.urls}", settings.tokenizer_path, model.tokenizer)
    if topk:
        require_top_of_servers(reading, f"{key}.urls={settings.urls}", model.tokenizer, topk)
    return reading


def require_top_of_servers(reading: ServedReading, owner: str, tokenizer: Any, count: int) -> None:
    """Raise ModelError unless each server lists its most likely tokens."""
    token_ids = tokenizer.encode(PROBES[0], add_special_tokens=False)
    for base in reading.bases:
        try:
            reading.try_top(base, token_ids, count)
        except RequestFailed as error:
            raise ModelError(
                f"{owner}: {base} does not list its {count} most likely tokens, for algorithm.distillation.topk "
                f"({error}); vLLM lists at most 20 unless it is started with --max-logprobs {count}"
            ) from error


def require_same_tokens_on_servers(reading: ServedReading, owner: str, path: str | None, own: Any) -> None:
    """Raise ModelError unless servers split the probes as the policy's tokenizer `own` does.

    Args:
        path: the tokenizer of servers that do not answer `/tokenize`.
    """
    if path:
        other, _ = load_tokenizer(path, vision_language=False, trust_remote_code=False)
        require_same_tokenizer(f"{owner}, tokenizer_path={path}", own, other)
        return
    texts = [*PROBES, *map(str, own.all_special_tokens)]
    for base in reading.bases:
        try:
            found = reading.tokenize(base, texts)
        except RequestFailed as error:
            raise ModelError(
                f"{owner}: {base} does not say how it tokenizes ({error}); set tokenizer_path to the teacher's model"
            ) from error
        for text, theirs in zip(texts, found, strict=True):
            mine = own.encode(text, add_special_tokens=False)
            if mine != theirs:
                raise ModelError(f"{owner}: {base} splits {text!r} into {theirs}, the policy into {mine}. {OTHER}")


# --- prompts of the teacher's own -------------------------------------------------------------------------------------


def _prompts(
    config: RunConfig, model: ModelFiles, prompts: Mixture, key: str, settings: OneTeacherConfig
) -> Callable[[Group], Prompt]:
    pixels = {"min_pixels": settings.min_pixels, "max_pixels": settings.max_pixels}
    own = config.data.model_copy(update={name: value for name, value in pixels.items() if value is not None})
    renderer = build_renderer(config.model_copy(update={"data": own}), model)
    rewrite: Callable[[Example], Example] = lambda example: example  # noqa: E731
    if settings.context:
        try:
            template = compile_format_prompt(Path(settings.context).read_text(encoding="utf-8"), settings.context)
        except DataError as error:
            raise ConfigError([Problem(f"{key}.context", str(error))]) from error
        rewrite = partial(rewrite_prompt if settings.style == "rewrite" else put_before, template.render)

    def prompt_of(group: Group) -> Prompt:
        if group.row < 0:
            raise DataError(f"{group.prompt.id}: its row is unknown, so that the teacher's prompt cannot be rendered")
        try:
            example = prompts.example(group.row, settings.image_key)
        except DataError as error:
            raise DataError(f"{error} ({key}.image_key)" if settings.image_key else str(error)) from error
        return renderer.render(rewrite(example))

    return prompt_of


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
