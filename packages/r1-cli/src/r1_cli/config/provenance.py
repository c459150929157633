"""Where a configuration came from, key by key."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Provenance:
    """The source of a run's settings.

    Example: `Provenance(Path("config.yaml"), ("trainer.max_steps=3",), {"trainer.max_steps": "command line"}, ())`
    """

    file: Path | None = None
    overrides: tuple[str, ...] = ()
    origins: Mapping[str, str] = field(default_factory=dict)  # key -> `file:line` or `command line`; no defaults
    notices: tuple[str, ...] = ()  # one line each, to be shown once

    def is_set(self, key: str) -> bool:
        """Whether the user gave this key, or a key of this section, instead of leaving the default."""
        return any(name == key or name.startswith(f"{key}.") for name in self.origins)
