"""Build the teachers that a run distils from: in the learner, in this process, or on servers."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from r1_cli.build.rewards.connect import padded_batching
from r1_cli.build.rewards.frozen_model import FrozenReading, open_frozen
from r1_cli.build.rewards.own_models import LearnerReading
from r1_cli.build.rewards.served_model import NO_LOGPROBS, ServedReading
from r1_cli.build.teacher_model import OTHER, PROBES, require_same_tokenizer
from r1_cli.build.teacher_prompts import Counter, TeacherRows, open_teacher_rows
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.distillation import POLICY, OneTeacherConfig
from r1_cli.hardware import Hardware
from r1_cli.models.files import ModelFiles
from r1_cli.models.load import ModelError, load_tokenizer
from r1_cli.train.teaching import AdvantageTeacher, LossTeacher, TeacherModel, Teachers, TopTeacher
from r1_cli.train.types import Policy, Teacher
from r1_core.advantages.distillation import Distillation
from r1_data.dataset import Mixture
from r1_rewards.services.endpoint import RequestFailed
from r1_rewards.types import RewardSpecError

SHOWN = 20  # the most likely tokens that vLLM returns unless `--max-logprobs` says otherwise
MOST = re.compile(r"greater than max allowed: (\d+)")  # vLLM's answer to a larger number


def build_teacher(
    config: RunConfig, hardware: Hardware, model: ModelFiles, learner: Policy, rows: Mapping[str, TeacherRows]
) -> Teacher:
    """Open the teachers of a run; `rows` has what `open_teachers` found.

    Raises ModelError if a model cannot be loaded or has other tokens than the policy.
    """
    distillation = config.algorithm.distillation
    if distillation.form == "loss" and not distillation.topk:
        return LossTeacher()
    opened: dict[int, TeacherModel] = {
        id(one): _open(config, hardware, model, learner, rows[key], key, one)
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
    rows: TeacherRows,
    key: str,
    settings: OneTeacherConfig,
) -> TeacherModel:
    temperature, path = config.worker.rollout.temperature, settings.model.model_path
    prompt_of = rows.prompts.prompt_of if rows.prompts else lambda group: group.prompt
    topk = config.algorithm.distillation.topk or 0
    reading: ServedReading | LearnerReading | FrozenReading
    if rows.reading is not None:
        reading = rows.reading
    elif path == POLICY or path == config.worker.teacher.in_learner:
        if not settings.privileged:
            return TeacherModel(None, prompt_of)
        reading = LearnerReading(learner, "teacher", temperature)
    else:
        name = f"{key}.model.model_path"
        trusted = settings.model.trust_remote_code
        batching = padded_batching(config)
        reading = open_frozen(path or "", name, config, hardware, model, batching, trust_remote_code=trusted)
    return TeacherModel(reading, prompt_of, partial(reading.read_top, count=topk, temperature=temperature))


def open_teachers(
    config: RunConfig, model: ModelFiles, rows: Mixture, counter: Counter | None = None
) -> dict[str, TeacherRows]:
    """Return what `open_teacher_rows` finds, with the servers of teachers, before any model is loaded.

    Raises:
        ConfigError, DataError, ModelError: as `open_teacher_rows` and `open_servers`.
    """
    topk, answer = config.algorithm.distillation.topk or 0, config.data.max_response_length
    found = open_teacher_rows(config, model, rows, counter)
    for key, one in config.worker.teacher.every.items():
        if one.urls:
            longest = found[key].longest + answer if found[key].longest else None
            found[key] = replace(found[key], reading=open_servers(one, key, model, topk, longest))
    return found


def open_servers(
    settings: OneTeacherConfig, key: str, model: ModelFiles, topk: int, longest: int | None = None
) -> ServedReading:
    """Open a teacher's servers, and compare what they give with what is needed.

    Args:
        longest: tokens of a prompt and its answer; None: unknown.

    Raises:
        ConfigError: an address is invalid.
        ModelError: a server has other tokens, gives no log-probs, lists too few, or reads too short texts.
    """
    try:
        reading = ServedReading(settings.urls or "", served_name=settings.served_name, token_env=settings.token_env)
    except RewardSpecError as error:
        raise ConfigError([Problem(f"{key}.urls", str(error), settings.urls)]) from error
    owner = f"{key}.urls={settings.urls}"
    require_same_tokens_on_servers(reading, owner, settings.tokenizer_path, model.tokenizer)
    require_logprobs_of_servers(reading, owner, model.tokenizer, topk)
    if longest is not None:
        require_length_of_servers(reading, owner, longest)
    return reading


def require_logprobs_of_servers(reading: ServedReading, owner: str, tokenizer: Any, topk: int) -> None:
    """Raise ModelError unless each server gives log-probs, and with `topk` those of its most likely tokens.

    Without `topk` some likely tokens are asked for all the same, which show whether the numbers are log-probs.
    """
    token_ids = tokenizer.encode(PROBES[0], add_special_tokens=False)
    for base in reading.bases:
        try:
            reading.try_top(base, token_ids, topk or SHOWN)
        except RequestFailed as error:
            if not topk and NO_LOGPROBS not in str(error):  # it lists none, which advantages do not need
                _try_plain(reading, owner, base, token_ids)
                continue
            raise ModelError(_why_no_top(owner, base, topk, str(error))) from error


def _try_plain(reading: ServedReading, owner: str, base: str, token_ids: list[int]) -> None:
    try:
        reading.try_top(base, token_ids, 0)
    except RequestFailed as error:
        raise ModelError(f"{owner}: {base} gives no log-probs of given tokens ({error})") from error


def _why_no_top(owner: str, base: str, topk: int, error: str) -> str:
    if NO_LOGPROBS in error:
        return f"{owner}: {base} gives no log-probs ({error})"
    if most := MOST.search(error):
        fix = f"or set algorithm.distillation.topk={most[1]}" if int(most[1]) else "or algorithm.distillation.topk=null"
        return (
            f"{owner}: {base} lists at most {most[1]} likely tokens, and algorithm.distillation.topk is {topk}: start "
            f"it with vllm serve --max-logprobs {topk}, {fix}"
        )
    return (
        f"{owner}: {base} does not list its {topk} most likely tokens, for algorithm.distillation.topk ({error}); vLLM "
        f"lists at most 20 unless it is started with --max-logprobs {topk}"
    )


def require_length_of_servers(reading: ServedReading, owner: str, longest: int) -> None:
    """Raise ModelError if a server says that it reads fewer than `longest` tokens and the one that it adds."""
    for base in reading.bases:
        most = reading.max_length(base)
        if most is not None and longest + 1 > most:
            raise ModelError(
                f"{owner}: {base} reads at most {most:,} tokens, and the longest prompt with an answer and one more "
                f"may have {longest + 1:,}: start it with vllm serve --max-model-len {longest + 1}, or lower "
                "data.max_response_length"
            )


def require_same_tokens_on_servers(reading: ServedReading, owner: str, path: str | None, own: Any) -> None:
    """Raise ModelError unless servers split the probes as the policy's tokenizer `own` does.

    Args:
        path: the tokenizer of servers that do not answer `/tokenize`.
    """
    if path:
        other, _ = load_tokenizer(path, vision_language=False, key=f"{owner}, tokenizer_path")
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
