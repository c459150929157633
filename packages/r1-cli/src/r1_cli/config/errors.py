"""What is wrong with a configuration, told all at once."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to correct. `origin` is `file:line`, `command line` or `default`."""

    key: str
    message: str
    value: str | None = None  # as it was written; None: no value belongs to it
    origin: str = ""

    def __str__(self) -> str:
        found = self.key if self.value is None else f"{self.key}={self.value}"
        return f"{found} ({self.origin}): {self.message}" if self.origin else f"{found}: {self.message}"


class ConfigError(ValueError):
    """A configuration that cannot be run; the message lists every problem found."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(f"{count} in the configuration\n" + "\n".join(f"  - {problem}" for problem in problems))
