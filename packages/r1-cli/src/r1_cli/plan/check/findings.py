"""Findings of checks, and the run that they share."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from r1_cli.config import Provenance, RunConfig
from r1_cli.config.fine_tuning import as_training

if TYPE_CHECKING:
    from r1_cli.build.rows import OpenSource
    from r1_cli.models.files import ModelFiles

Level = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One result. Example: `Finding("model.files", "error", "shard 2 is missing", "copy it again")`."""

    key: str  # what was looked at, such as `data.media`; the part before the dot is the check's
    level: Level
    message: str
    fix: str = ""  # what to do; "" where the message says it

    def as_json(self) -> dict[str, str]:
        return asdict(self)


class Subject:
    """A loaded configuration, whose model and sources are opened once on demand."""

    def __init__(self, words: Sequence[str], config: RunConfig, provenance: Provenance) -> None:
        self.words, self.provenance = tuple(words), provenance
        self.tunes = provenance.is_set("sft")  # a configuration of `r1 sft`, which is seen as its learner sees it
        self.written, self.config = config, as_training(config) if self.tunes else config

    @cached_property
    def model(self) -> "ModelFiles":
        """Raises ModelError."""
        from r1_cli.models.files import open_model

        return open_model(self.config)

    @cached_property
    def sources(self) -> "list[OpenSource]":
        """The local sources, training first. Raises DataError."""
        from r1_cli.build.rows import open_local
        from r1_cli.config.sources import training_sources, validation_sources

        data = self.config.data
        opened = [*open_local(training_sources(data)), *open_local(validation_sources(data))]
        return [one for one in opened if one is not None]


Check = Callable[[Subject], Iterable[Finding]]


def examine(name: str, check: Check, subject: Subject) -> Iterator[Finding]:
    """Yield a check's findings; an exception becomes one."""
    try:
        yield from check(subject)
    except Exception as error:  # whatever a user's reward, files or machine make of it
        message = f"{type(error).__name__}: {error}".strip(": ")
        yield Finding(f"{name}.failed", "error", message[:2000])
