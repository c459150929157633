"""r1 train, r1 merge, r1 eval: one run, from a config to a checkpoint. `open_run` is `r1 train` from Python."""

import warnings
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from r1_cli.api import OpenRun as OpenRun
    from r1_cli.api import Step as Step
    from r1_cli.api import open_run as open_run
    from r1_cli.api import read_config as read_config
    from r1_cli.config.problems import ConfigError as ConfigError
    from r1_cli.config.root import RunConfig as RunConfig
    from r1_cli.jobs.own_loop import open_parts as open  # noqa: F401
    from r1_cli.runs.reader import RunReader as RunReader
    from r1_cli.train.groups.group import Group as Group
    from r1_cli.train.groups.group import Response as Response

    __version__: str

# Public names, and the module that has each, imported at first use.
PUBLIC = {
    "ConfigError": "config.problems",
    "Group": "train.groups.group",
    "OpenRun": "api",
    "Response": "train.groups.group",
    "RunConfig": "config.root",
    "RunReader": "runs.reader",
    "Step": "api",
    "open_run": "api",
    "read_config": "api",
}
__all__ = [*PUBLIC]  # without `open`: `from r1_cli import *` would hide Python's own


if not TYPE_CHECKING:  # which would accept any name

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            return version("r1-cli")
        if name in ("open", "open_run"):
            import_module("r1_cli.commands.common").share_processors()  # before they load torch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "IProgress not found")  # by tqdm, in a notebook; r1 has bars of its own
            if name == "open":
                return import_module("r1_cli.jobs.own_loop").open_parts
            if name in PUBLIC:
                return getattr(import_module(f"r1_cli.{PUBLIC[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *PUBLIC, "__version__", "open"])
