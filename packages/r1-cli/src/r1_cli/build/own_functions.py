"""Give functions of a Python program to a run: written to files of its folder, or called in this process."""

import ast
import hashlib
import inspect
import json
import logging
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from r1_cli.build.user_code import IN_PROCESS
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.multi_turn import KEY as MULTI_TURN
from r1_cli.config.section import with_value
from r1_rewards.types import RewardSpecError
from r1_rewards.workers.source import write_function

FOLDER = "code"  # in the run's folder
REWARD, LOSS = "worker.reward.reward_function", "worker.actor.loss_type"
ESTIMATOR, TOOLS = "algorithm.adv_estimator", f"{MULTI_TURN}.tools"
KINDS = {REWARD: "reward", LOSS: "loss", ESTIMATOR: "estimator", TOOLS: "tool"}

log = logging.getLogger("r1")

Function = Callable[..., Any]


@dataclass(slots=True)
class OwnFunctions:
    """Functions by key, as `file.py:function`; those without a file are in `draft` until the run's folder is known."""

    draft: Path
    specs: dict[str, str | list[str]] = field(default_factory=dict)  # by key
    called_here: dict[str, Function] = field(default_factory=dict)  # by spec: other processes cannot be given them

    def add(self, key: str, function: Function) -> None:
        """Write a function to a file, if it has none, or keep it for this process.

        Raises:
            ConfigError: a tool, which runs in a process of its own, cannot be written.
        """
        self.specs[key] = self._spec_of(key, function)

    def add_tools(self, tools: Sequence[str | Function]) -> None:
        self.specs[TOOLS] = [self._spec_of(TOOLS, tool) if callable(tool) else tool for tool in tools]

    def words(self) -> list[str]:
        """Return the settings as words of a command."""
        enable = [f"{MULTI_TURN}.enable=true"] if TOOLS in self.specs else []
        return [
            *enable,
            *(f"{key}={one if isinstance(one, str) else json.dumps(one)}" for key, one in self.specs.items()),
        ]

    def moved(self, config: RunConfig, folder: Path) -> RunConfig:
        """Move the files into the run's folder; return the configuration that names them there."""
        if any(self.draft.rglob("*.py")):
            shutil.copytree(self.draft, folder / FOLDER, dirs_exist_ok=True)
        for key, one in self.specs.items():
            specs = [one] if isinstance(one, str) else one
            named = [
                str(folder / FOLDER) + spec.removeprefix(str(self.draft)) if self._drafted(spec) else spec
                for spec in specs
            ]
            config = with_value(config, key, named[0] if isinstance(one, str) else named)
            self.called_here |= {
                new: self.called_here.pop(old) for old, new in zip(specs, named, strict=True) if old in self.called_here
            }
        return config

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let the run find the functions of this process inside the block."""
        mine = {
            f"{Path(spec.rpartition(':')[0]).resolve()}:{spec.rpartition(':')[2]}": one
            for spec, one in self.called_here.items()
        }
        IN_PROCESS.update(mine)
        try:
            yield
        finally:
            for spec in mine:
                IN_PROCESS.pop(spec, None)

    def _drafted(self, spec: str) -> bool:
        return spec.startswith(f"{self.draft}{os.sep}")

    def _spec_of(self, key: str, function: Function) -> str:
        kind = KINDS[key]
        (folder := self.draft / kind).mkdir(parents=True, exist_ok=True)
        try:
            path, _, name = write_function(function, folder, kind).rpartition(":")
            return f"{os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path}:{name}"
        except RewardSpecError as error:
            if key == TOOLS:
                raise ConfigError([Problem(key, f"{error}; a tool runs in a process of its own")]) from error
            spec = _write_record(function, folder, kind)
            self.called_here[spec] = function
            limits = ", so nothing can end it if it hangs or crashes" if key == REWARD else ""
            log.warning("%s; it is called in this process%s", error, limits)
            return spec


def _write_record(function: Function, folder: Path, kind: str) -> str:
    """Write what is known of a function that only this process can call, in the form of a file of its own."""
    name = getattr(function, "__name__", type(function).__name__)
    name = name if name.isidentifier() else kind
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        source = f"bytecode {hashlib.sha256(code.co_code).hexdigest()}" if code else repr(type(function))
    cells = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    around = [f"{key} = {value!r}" for key, value in cells.items() if _is_literal(value)]
    attributes = [
        f"{name}.{key} = {value!r}" for key, value in getattr(function, "__dict__", {}).items() if _is_literal(value)
    ]
    told = f"{kind} {name!r} is a function of a Python program: pass it to r1_cli.open_run({kind}=…)"
    lines = [
        f'"""The {kind} of a Python program, which only that program can call. What it was:"""',
        *(f"# {line}".rstrip() for line in [*around, *source.splitlines()]),
        "",
        "",
        f"def {name}({_parameters(function)}):",
        f"    raise RuntimeError({told!r})",
        *(["", "", *attributes] if attributes else []),
    ]
    (file := folder / f"{name}.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"{file}:{name}"


def _parameters(function: Function) -> str:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return "*args, **kwargs"
    bare = [
        one.replace(annotation=one.empty, default=one.empty if one.default is one.empty else None) for one in parameters
    ]
    return str(inspect.Signature(bare)).strip("()")


def _is_literal(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError):
        return False
