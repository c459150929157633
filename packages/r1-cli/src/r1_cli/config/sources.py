"""The sources of a run as one list, and their numbers of rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from r1_cli.config.data import DataConfig, SourceConfig
from r1_cli.config.files import folder_problems, reward_problems, template_problems
from r1_cli.config.multi_turn import KEY as MULTI_TURN
from r1_cli.config.multi_turn import MultiTurnSettings, environment_problems, tool_problems
from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.rows import ColumnsConfig, TagsConfig
from r1_cli.config.section import Tree, lookup
from r1_data.tables.spec import answers_per_prompt, name_source
from r1_data.types import DataError

MESSAGES = DataConfig.model_fields["messages_key"].default
SAMPLING = ("temperature", "top_p", "max_tokens")  # what a source can set for its validation, beside n
COLUMNS = {"prompt_key", "answer_key"}  # who sets one of them wants no detection


@dataclass(frozen=True, slots=True)
class ConversationColumns:
    """The columns of a source's fine-tuning rows."""

    messages: str | None  # None: detected
    tools: str
    others: ColumnsConfig
    tags: TagsConfig


@dataclass(frozen=True, slots=True)
class Source:
    """One source, with the values that it inherits from `data`."""

    key: str  # where it stands in the configuration, e.g. `data.sources[1]`
    name: str  # differs from all others' of its list
    files: tuple[str, ...]
    weight: float | None
    n: int | None
    sampling: Tree  # what it sets itself of temperature, top_p and max_tokens
    groups: tuple[str, ...]  # columns
    row_format: str | None
    columns: tuple[str, str, str, str]  # prompt, answer, images, videos
    explicit_columns: bool  # the user named the prompt or answer column
    conversation: ConversationColumns
    image_dir: str | None
    allow_urls: bool
    format_prompt: str | None
    system_prompt: str | None
    reward_function: str | None  # None: the run's
    reward_function_kwargs: Tree
    tools: tuple[str, ...] = ()  # none, and no environment: those of the run
    environment: str | None = None
    environment_kwargs: Tree = field(default_factory=dict)

    @property
    def names_conversations(self) -> bool:
        """Whether the user named the columns of fine-tuning rows, so that no format of them is detected."""
        return self.explicit_columns or self.conversation.messages is not None or self.row_format is not None

    @property
    def actor(self) -> tuple[tuple[str, ...], str | None, Tree]:
        """What answers the policy in its rows."""
        return self.tools, self.environment, self.environment_kwargs

    @property
    def has_actor(self) -> bool:
        """Whether tools or an environment of its own answer the policy."""
        return bool(self.tools or self.environment)

    @property
    def label(self) -> str:
        return f"{self.key}={self.files[0] if len(self.files) == 1 else list(self.files)}"

    @property
    def reward(self) -> tuple[str | None, Tree]:
        return self.reward_function, self.reward_function_kwargs

    def file_problems(self, data: DataConfig) -> Iterator[KeyProblem]:
        key = self.key.partition("[")[0]
        where = "" if self.key == key else f"{self.key.removeprefix(key)}: "
        yield from ((key, where + message) for _, message in self._own_problems(key, data))

    def _own_problems(self, key: str, data: DataConfig) -> Iterator[KeyProblem]:
        try:
            count_rows([self])
        except DataError as error:
            yield key, str(error)
        if self.format_prompt != data.format_prompt:
            yield from template_problems(key, self.format_prompt)
        if self.image_dir != data.image_dir:
            yield from folder_problems(key, self.image_dir)
        yield from reward_problems((key, key), *self.reward)


def training_sources(data: DataConfig) -> list[Source]:
    if data.sources is not None:
        return _resolve(data, data.sources, "data.sources")
    return _resolve(data, _from_files(data.train_files, data.train_probs), "data.train_files")


def validation_sources(data: DataConfig) -> list[Source]:
    if data.val_sources is not None:
        return _resolve(data, data.val_sources, "data.val_sources")
    return _resolve(data, _from_files(data.val_files, None), "data.val_files")


def source_actors(data: DataConfig) -> dict[str, Source]:
    """Return the sources whose rows have tools or an environment of their own, by name, training first."""
    found: dict[str, Source] = {}
    for source in (*training_sources(data), *validation_sources(data)):
        if source.has_actor:
            found.setdefault(source.name, source)
    return found


def count_rows(sources: Sequence[Source]) -> list[int] | None:
    """Return the number of rows of each source, None if that takes a download. Raises DataError."""
    counts = [_count(source.files) for source in sources]
    return None if None in counts else [count for count in counts if count is not None]


@cache
def _count(files: tuple[str, ...]) -> int | None:
    from r1_data import sources

    return sources.count_rows(list(files))


def _from_files(files: str | list[str] | None, weights: list[float] | None) -> list[SourceConfig]:
    listed = [files] if isinstance(files, str) else files or []
    shares = weights if weights is not None and len(weights) == len(listed) else [None] * len(listed)
    return [SourceConfig(files=one, weight=share) for one, share in zip(listed, shares, strict=True)]


def _resolve(data: DataConfig, sections: list[SourceConfig], key: str) -> list[Source]:
    listed = [(section, _listed(section.files)) for section in sections]
    names = [section.name or (name_source(files[0]) if files else key) for section, files in listed]
    twice = Counter(names)
    return [
        Source(
            key=f"{key}[{index}]" if len(sections) > 1 or key.endswith("sources") else key,
            name=name if twice[name] == 1 else f"{name}_{index}",
            files=files,
            weight=section.weight,
            n=section.n or (answers_per_prompt(files[0]) if files else None),
            sampling={name: value for name in SAMPLING if (value := lookup(section, name)) is not None},
            groups=tuple(section.groups),
            row_format=section.row_format if COLUMNS & section.model_fields_set else _own(section, data, "row_format"),
            columns=(
                _own(section, data, "prompt_key"),
                _own(section, data, "answer_key"),
                _own(section, data, "image_key"),
                _own(section, data, "video_key"),
            ),
            explicit_columns=bool(COLUMNS & section.model_fields_set) or _names_columns(data),
            conversation=ConversationColumns(
                None if (named := _own(section, data, "messages_key")) == MESSAGES else named,
                *(_own(section, data, name) for name in ("tools_key", "columns", "tags")),
            ),
            image_dir=_own(section, data, "image_dir"),
            allow_urls=data.allow_urls,
            format_prompt=_own(section, data, "format_prompt"),
            system_prompt=_own(section, data, "system_prompt"),
            reward_function=section.reward_function,
            reward_function_kwargs=section.reward_function_kwargs,
            tools=tuple(section.tools or ()),
            environment=section.environment,
            environment_kwargs=section.environment_kwargs,
        )
        for index, ((section, files), name) in enumerate(zip(listed, names, strict=True))
    ]


def _listed(files: str | list[str]) -> tuple[str, ...]:
    return (files,) if isinstance(files, str) else tuple(files)


def _names_columns(data: DataConfig) -> bool:
    return any(lookup(data, name) != DataConfig.model_fields[name].default for name in COLUMNS)


def _own(section: SourceConfig, data: DataConfig, name: str) -> Any:
    return lookup(section if name in section.model_fields_set else data, name)


def row_problems(data: DataConfig, command: str) -> Iterator[KeyProblem]:
    if not rows_of(data, command):
        key = "data.val_files" if command == "eval" else "data.train_files"
        yield key, "is missing: name a hub dataset (name@split), a folder or a .json, .jsonl, .parquet or .csv file"


def rows_of(data: DataConfig, command: str) -> list[Source]:
    train, validation = training_sources(data), validation_sources(data)
    if command == "eval":
        return validation
    return train if command in ("train", "sft", "sample", "rows") else train + validation


def source_reward_problems(data: DataConfig, command: str) -> Iterator[KeyProblem]:
    """Yield a missing reward, if the run has no reward of its own."""
    train, validation = training_sources(data), validation_sources(data)
    scored = train if command == "sample" else validation if command in ("eval", "sft") else train + validation
    judged = source_actors(data)  # by their environments
    named = {source.name for source in scored if source.reward_function}
    named |= {name for name, source in judged.items() if source.environment}
    if not (scored and all(source.name in named for source in scored)):
        yield "worker.reward.reward_function", "is missing: name math, r1v, gsm8k or ./file.py:function"


def source_problems(data: DataConfig) -> Iterator[KeyProblem]:
    for sections, files in (("sources", "train_files"), ("val_sources", "val_files")):
        if lookup(data, sections) is not None and lookup(data, files) is not None:
            yield f"data.{sections}", f"stands in place of data.{files}; set one of them"
    if data.train_probs is not None:
        entries = len(data.train_files) if isinstance(data.train_files, list) else int(data.train_files is not None)
        if len(data.train_probs) != entries:
            yield "data.train_probs", f"must have one number for each of the {entries} entries of data.train_files"
        elif abs(sum(data.train_probs) - 1) > 1e-6:
            yield "data.train_probs", f"must add up to 1, not to {sum(data.train_probs):g}"
    yield from _sampling_problems(data)
    weights = [source.weight for source in training_sources(data)]
    if None in weights and any(weights):
        yield "data.sources", "must all have a weight, or none of them"
    for key, named in (("sources", training_sources(data)), ("val_sources", validation_sources(data))):
        if any(not source.files for source in named):
            yield f"data.{key}", "has a source whose files are an empty list"
        if len({source.name for source in named}) < len(named):
            yield f"data.{key}", "has two sources of one name"
    own = {source.name: source.reward for source in training_sources(data) if source.reward_function}
    for source in validation_sources(data):
        if source.reward_function and own.get(source.name, source.reward) != source.reward:
            yield "data.val_sources", f"has a source {source.name!r} with another reward than in training; rename it"


def _sampling_problems(data: DataConfig) -> Iterator[KeyProblem]:
    """Yield what is wrong with how single sources are sampled and reported in validation."""
    for source in training_sources(data):
        if found := [*source.sampling, *(["groups"] if source.groups else [])]:
            yield "data.sources", f"{source.name} sets {found[0]}, which is of validation: set it in data.val_sources"
    for source in validation_sources(data):
        if (most := source.sampling.get("max_tokens", 0)) > data.max_response_length:
            limit = f"data.max_response_length, which is {data.max_response_length}"
            yield "data.val_sources", f"{source.name} has max_tokens {most}: it must be at most {limit}"


def source_actor_problems(data: DataConfig, multi_turn: MultiTurnSettings) -> Iterator[KeyProblem]:
    """Yield what is wrong with the tools and environments of single sources."""
    actors = source_actors(data)
    for source in (*training_sources(data), *validation_sources(data)):
        key = source.key.partition("[")[0]
        for where, message in _actor_problems(source, actors.get(source.name, source), multi_turn):
            yield key, f"{source.key.removeprefix(key)}.{where}: {message}"


def _actor_problems(source: Source, first: Source, multi_turn: MultiTurnSettings) -> Iterator[KeyProblem]:
    """Yield problems by key of the source. `first` is the first of its name that has an actor."""
    if source.environment_kwargs and not source.environment:
        yield "environment_kwargs", "needs environment"
    if not source.has_actor:
        return
    own = "tools" if source.tools else "environment"
    if source.tools and source.environment:
        yield "environment", "cannot be used with tools: set one of them"
    if not multi_turn.enable:
        yield own, f"needs {MULTI_TURN}.enable=true"
    elif multi_turn.agent:
        yield own, f"cannot be used with {MULTI_TURN}.agent"
    if source.actor != first.actor:
        yield own, f"differs from that of the source {source.name!r} in training; rename it"
    yield from tool_problems("tools", source.tools)
    yield from environment_problems("environment", source.environment)


REMARKS = (
    KeyRemark(
        "data.stopping_strategy",
        "no source has a weight",
        lambda v, c: not any(source.weight for source in training_sources(c.data)),
    ),
)
