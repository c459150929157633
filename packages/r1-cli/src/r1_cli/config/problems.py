"""Problems and remarks of a configuration, and the origin of each value."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Applies = Callable[[Any, Any], bool]  # to the value of a key, and the RunConfig that has it
KeyProblem = tuple[str, str]  # a key, and what is wrong with its value


SECRET = re.compile(r"(api_?key|secret|password|passwd|credential|(^|_)token)$", re.IGNORECASE)  # the end of a key
MASK = "***"
URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")


def hide_url_passwords(text: str) -> str:
    """Return the text with `***` in place of each `user:password` of a URL."""
    return URL_PASSWORD.sub(MASK, text)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct. `origin` is `file:line`, `command line` or `default`."""

    key: str
    message: str
    value: str | None = None  # as it was written; None: no value belongs to it
    origin: str = ""

    def __str__(self) -> str:
        value = MASK if self.value and SECRET.search(self.key.rpartition(".")[2]) else self.value
        found = self.key if value is None else f"{self.key}={hide_url_passwords(value)}"
        return f"{found} ({self.origin}): {self.message}" if self.origin else f"{found}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be used; the message and `problems` list everything that is wrong with it."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the configuration\n" + "\n".join(f"  - {problem}" for problem in problems))


@dataclass(frozen=True, slots=True)
class KeyRemark:
    """Why a key, or a section's keys, has no effect or is not supported in some configurations."""

    key: str
    reason: str
    applies: Applies | None = None  # None: always
    only_if_set: bool = False  # by the user; else where the value differs from the default


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a run's settings.

    Example: `Provenance(Path("config.yaml"), ("trainer.max_steps=3",), {"trainer.max_steps": "command line"}, ())`
    """

    file: Path | None = None
    overrides: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)  # key -> `file:line` or `command line`; no defaults
    notices: tuple[str, ...] = ()  # one line each, to be shown once

    def is_set(self, key: str) -> bool:
        """Whether the user gave this key, or one of this section."""
        return any(name == key or name.startswith(f"{key}.") for name in self.origins)


def nearest_divisors(total: int, number: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    below = [d for d in divisors if d < number][-1:]
    above = [d for d in divisors if d > number][:1]
    return " or ".join(map(str, below + above))
