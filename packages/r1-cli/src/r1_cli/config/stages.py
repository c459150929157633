"""The file of `r1 run`: stages, each a command with its configuration, whose inputs may be outputs of other stages."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from r1_cli.config.problems import ConfigError, Problem
from r1_cli.config.settings import Setting, read_file

REFERENCE = re.compile(r"\$\{stages\.([\w-]+)\.(\w+)\}")
NAME = re.compile(r"[A-Za-z0-9][\w-]*")
PARTS = ("command", "config", "model", "samples", "settings", "options")


@dataclass(frozen=True, slots=True)
class StageCommand:
    reads: str | None  # the key of its argument
    has_config: bool
    writes: str  # the name of its output


COMMANDS: Mapping[str, StageCommand] = {
    "train": StageCommand(None, True, "model"),
    "sft": StageCommand(None, True, "model"),
    "sample": StageCommand("model", True, "samples"),
    "rows": StageCommand("samples", False, "rows"),
    "eval": StageCommand("model", True, "result"),
    "merge": StageCommand("model", False, "model"),
}


@dataclass(slots=True)
class Stage:
    name: str
    origin: str  # `file:line`
    command: str = ""
    config: str | None = None
    argument: Setting | None = None
    settings: list[Setting] = field(default_factory=list)  # keys of the configuration
    options: list[Setting] = field(default_factory=list)  # of the command, without dashes

    @property
    def kind(self) -> StageCommand:
        return COMMANDS[self.command]

    @property
    def inputs(self) -> list[Setting]:
        return [*([self.argument] if self.argument else []), *self.settings, *self.options]

    @property
    def needs(self) -> list[str]:
        """Names of the stages whose outputs it reads."""
        found = [name for one in self.inputs for name, _ in REFERENCE.findall(json.dumps(one.value))]
        return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Stages:
    file: Path
    output: Path  # folder of all stages
    stages: tuple[Stage, ...]  # in the order in which they run


def read_stages(path: Path) -> Stages:
    """Read the file. Raises ConfigError, which lists all problems with file, line and key."""
    found: dict[str, Stage] = {}
    problems: list[Problem] = []
    base = output = None
    for one in read_file(path):
        head, _, rest = one.key.partition(".")
        if one.key in ("base", "output") and isinstance(one.value, str):
            base, output = (one.value, output) if one.key == "base" else (base, one.value)
        elif head == "stages" and rest:
            name, _, key = rest.partition(".")
            stage = found.setdefault(name, Stage(name, one.origin))
            if problem := _read_part(stage, key, one):
                problems.append(problem)
        else:
            problems.append(_wrong(one, "expected base: CONFIG.yaml, output: FOLDER and stages: {NAME: {command: …}}"))
    if output is None:
        problems.append(Problem("output", "is missing: name the folder that the stages write to", None, str(path)))
    if not found:
        problems.append(Problem("stages", "there is none", None, str(path)))
    for stage in found.values():
        stage.config = stage.config or base
        problems += _problems_of(stage, found)
    if problems:
        raise ConfigError(problems)
    return Stages(path, Path(output or ""), tuple(_in_order(found)))


def resolve(value: object, outputs: Mapping[str, Path]) -> object:
    """Return a value with the outputs of stages, by their names, in place of references."""
    if isinstance(value, str):
        return REFERENCE.sub(lambda match: str(outputs[match[1]]), value)
    if isinstance(value, list):
        return [resolve(one, outputs) for one in value]
    return value


def _read_part(stage: Stage, key: str, one: Setting) -> Problem | None:
    part, _, rest = key.partition(".")
    if part not in PARTS or (part in ("settings", "options")) != bool(rest):
        if part in ("settings", "options") and one.value in (None, {}):
            return None
        near = get_close_matches(part, PARTS, n=1)
        return _wrong(one, "unknown key" + (f"; did you mean {near[0]}?" if near else f"; known: {', '.join(PARTS)}"))
    if rest:
        kept = Setting(rest, one.value, one.raw, one.origin)
        (stage.settings if part == "settings" else stage.options).append(kept)
    elif not isinstance(one.value, str):
        return _wrong(one, "must be text")
    elif part == "command":
        stage.command = one.value
    elif part == "config":
        stage.config = one.value
    elif stage.argument is not None:
        return _wrong(one, "a stage reads a model or samples, not both")
    else:
        stage.argument = Setting(part, one.value, one.raw, one.origin)
    return None


def _problems_of(stage: Stage, found: Mapping[str, Stage]) -> Iterator[Problem]:
    where = f"stages.{stage.name}"
    if not NAME.fullmatch(stage.name):
        yield Problem(where, "a name has letters, digits, - and _ only: it becomes a folder", None, stage.origin)
    if stage.command not in COMMANDS:
        near = get_close_matches(stage.command, COMMANDS, n=1)
        told = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(COMMANDS)}"
        yield Problem(f"{where}.command", f"is no command of stages{told}", stage.command or None, stage.origin)
        return
    kind, given = stage.kind, stage.argument.key if stage.argument else None
    if given != kind.reads:
        told = f"needs {kind.reads}: …" if kind.reads else f"takes no {given}: set worker.actor.model.model_path"
        yield Problem(f"{where}.{kind.reads or given}", f"r1 {stage.command} {told}", None, stage.origin)
    if kind.has_config and stage.config is None:
        yield Problem(
            f"{where}.config", f"r1 {stage.command} needs a configuration: set it, or base", None, stage.origin
        )
    if stage.settings and not kind.has_config:
        yield Problem(f"{where}.settings", f"r1 {stage.command} has no configuration; set options", None, stage.origin)
    for one in stage.inputs:
        yield from _reference_problems(where, one, found)


def _reference_problems(where: str, one: Setting, found: Mapping[str, Stage]) -> Iterator[Problem]:
    text = json.dumps(one.value)
    key = f"{where}.{one.key}"
    if "${stages" in REFERENCE.sub("", text):
        yield Problem(key, "write ${stages.NAME.OUTPUT}", one.raw, one.origin)
    for name, output in REFERENCE.findall(text):
        if name not in found:
            near = get_close_matches(name, found, n=1)
            told = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(found)}"
            yield Problem(key, f"there is no stage {name}{told}", one.raw, one.origin)
        elif (kind := COMMANDS.get(found[name].command)) and output != kind.writes:
            told = f"stage {name} (r1 {found[name].command}) has no {output}; its output is {kind.writes}"
            yield Problem(key, told, one.raw, one.origin)


def _in_order(found: Mapping[str, Stage]) -> list[Stage]:
    """Return the stages in the file's order, each behind those that it needs. Raises ConfigError for a cycle."""
    left, placed = dict(found), dict[str, Stage]()
    while left:
        ready = next((one for one in left.values() if all(name in placed for name in one.needs)), None)
        if ready is None:
            told = "; ".join(f"{one.name} needs {', '.join(one.needs)}" for one in left.values())
            first = next(iter(left.values())).origin
            raise ConfigError([Problem("stages", f"stages wait for one another: {told}", None, first)])
        placed[ready.name] = left.pop(ready.name)
    return [*placed.values()]


def _wrong(one: Setting, message: str) -> Problem:
    return Problem(one.key, message, one.raw, one.origin)
