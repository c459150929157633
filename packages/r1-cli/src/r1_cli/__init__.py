"""r1 train, r1 merge, r1 eval: one run, from a config to a checkpoint. `r1_cli.open` hands out a run's parts."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r1_cli.jobs.own_loop import open_parts as open  # noqa: F401

__all__: list[str] = []  # not `open`: `from r1_cli import *` would hide Python's own


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("r1-cli")
    if name == "open":
        return import_module("r1_cli.jobs.own_loop").open_parts
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "__version__", "open"])
