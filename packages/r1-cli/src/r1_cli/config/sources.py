"""The sources of a run as one list, whether the configuration names files or sections, and how many rows each has."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from r1_cli.config.data import DataConfig, SourceConfig
from r1_data.tables.names import answers_per_prompt, name_source

COLUMNS = {"prompt_key", "answer_key"}  # who sets one of them wants no detection


@dataclass(frozen=True, slots=True)
class Source:
    """One source with everything that it inherits from `data` filled in."""

    key: str  # where it stands in the configuration, e.g. `data.sources[1]`
    name: str  # differs from all others' of its list
    files: tuple[str, ...]
    weight: float | None
    n: int | None
    row_format: str | None
    columns: tuple[str, str, str, str]  # prompt, answer, images, videos
    explicit_columns: bool  # the user named the prompt or answer column
    image_dir: str | None
    allow_urls: bool
    format_prompt: str | None
    system_prompt: str | None
    reward_function: str | None  # None: the run's
    reward_function_kwargs: dict[str, Any]

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"{self.key}={self.files[0] if len(self.files) == 1 else list(self.files)}"


def training_sources(data: DataConfig) -> list[Source]:
    """Return the sources of training rows, [] where none is named."""
    if data.sources is not None:
        return _resolve(data, data.sources, "data.sources")
    return _resolve(data, _from_files(data.train_files, data.train_probs), "data.train_files")


def validation_sources(data: DataConfig) -> list[Source]:
    """Return the sources of validation rows, [] where none is named."""
    if data.val_sources is not None:
        return _resolve(data, data.val_sources, "data.val_sources")
    return _resolve(data, _from_files(data.val_files, None), "data.val_files")


def count_rows(sources: Sequence[Source]) -> list[int] | None:
    """Return the number of rows of each source, None where it takes a download to know.

    Raises:
        r1_data.types.DataError: no such file, or one that cannot be read.
    """
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
            row_format=section.row_format if COLUMNS & section.model_fields_set else _own(section, data, "row_format"),
            columns=(
                _own(section, data, "prompt_key"),
                _own(section, data, "answer_key"),
                _own(section, data, "image_key"),
                _own(section, data, "video_key"),
            ),
            explicit_columns=bool(COLUMNS & section.model_fields_set) or _names_columns(data),
            image_dir=_own(section, data, "image_dir"),
            allow_urls=data.allow_urls,
            format_prompt=_own(section, data, "format_prompt"),
            system_prompt=_own(section, data, "system_prompt"),
            reward_function=section.reward_function,
            reward_function_kwargs=section.reward_function_kwargs,
        )
        for index, ((section, files), name) in enumerate(zip(listed, names, strict=True))
    ]


def _listed(files: str | list[str]) -> tuple[str, ...]:
    return (files,) if isinstance(files, str) else tuple(files)


def _names_columns(data: DataConfig) -> bool:
    """Whether prompts and answers have columns of their own, not the defaults, which a run's saved settings name."""
    return any(getattr(data, name) != DataConfig.model_fields[name].default for name in COLUMNS)


def _own(section: SourceConfig, data: DataConfig, name: str) -> Any:
    """What the source says, null included; else what all of `data` says."""
    return getattr(section if name in section.model_fields_set else data, name)
