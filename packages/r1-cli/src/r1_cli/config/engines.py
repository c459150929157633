"""Which engines there are, and which one a configuration means: one for each module in `r1_cli/build/engines/`."""

from collections.abc import Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Protocol, cast

AUTO, SERVERS = "auto", "servers"  # servers sample where `worker.rollout.servers` says so, whatever the name
_FOUND = {found.name for found in iter_modules([str(Path(__file__).parents[1] / "build" / "engines")])}
ENGINES = (AUTO, *sorted(_FOUND - {SERVERS}))


class EngineModule(Protocol):
    """What a module of an engine has."""

    IGNORES: Mapping[str, str]  # keys of `worker.rollout` that this engine has no use for, and why

    def missing(self) -> str | None:
        """Return what has to be installed before it can sample; None if nothing."""

    def preferred(self) -> bool:
        """Whether `auto` means this engine on this machine."""

    def open_engine(self, setup: Any, stack: ExitStack) -> Any:
        """Make the engine, which ends with `stack`; see `r1_cli.build.engines.EngineSetup`."""


def engine_module(name: str) -> EngineModule:
    """Return the module of the engine that is named, or of the one that `auto` means here."""
    if name != AUTO:
        return _load(name)
    preferred = [module for module in map(_load, ENGINES[1:]) if module.preferred()]
    return preferred[0] if preferred else _load("embedded")


def _load(name: str) -> EngineModule:
    return cast(EngineModule, import_module(f"r1_cli.build.engines.{name}"))
