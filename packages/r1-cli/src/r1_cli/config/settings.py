"""Read a YAML file and `key=value` words as flat settings with their origin."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os.path import isfile
from pathlib import Path
from typing import Any

import yaml

from r1_cli.config.problems import ConfigError, Problem
from r1_cli.config.section import flatten
from r1_data.tables.files import kind_of

COMMAND_LINE, PYTHON = "command line", "Python"


@dataclass(frozen=True, slots=True)
class Setting:
    """One value as the user wrote it.

    Example: `Setting("worker.actor.optim.lr", 1e-06, "1e-6", "config.yaml:31")`
    """

    key: str
    value: Any
    raw: str  # the text before YAML read it
    origin: str  # `file:line` or `command line`
    added: bool = False  # written with a leading `+`


class Loader(yaml.SafeLoader):
    """YAML with `1e-6` as a number, `None` as null, and `12:30`, `007` and dates as text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own interface)


for _tag, _text, _first in (
    ("bool", r"(?:yes|no|true|false|on|off)", "yYnNtTfFoO"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:\d[\d_]*\.\d*|\.\d+|\d+(?=e))(?:e[-+]?\d+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("null", r"(?:~|null|none|)", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    _pattern = re.compile(f"^(?:{_text})$", re.IGNORECASE)
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))


def read_file(path: Path) -> list[Setting]:
    """Return the file's settings in order.

    Raises:
        ConfigError: no such file, not YAML, not a mapping, or a key given twice.
    """
    if not isfile(path):
        near = get_close_matches(str(path), [str(p) for p in path.parent.glob("*.y*ml")], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f" (working directory: {Path.cwd()})"
        raise ConfigError([Problem("config", f"no such file{hint}", str(path), COMMAND_LINE)])
    if kind_of(path) and path.suffix.lower() != ".json":
        raise ConfigError([_is_data(path)])
    try:
        loader = Loader(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        where = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        raise ConfigError([Problem("config", f"is not YAML text in UTF-8{where}", str(path), COMMAND_LINE)]) from error
    except OSError as error:
        raise ConfigError([Problem("config", f"cannot be read ({error.strerror})", str(path), COMMAND_LINE)]) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            sections = Problem(str(path), "the file must hold sections: data, algorithm, worker, trainer")
            raise ConfigError([_is_data(path) if kind_of(path) else sections])
        return list(_flatten(loader, root, "", str(path)))
    except yaml.YAMLError as error:
        rows = kind_of(path) and "document start" in _reason(error)  # a row a line
        raise ConfigError([_is_data(path) if rows else Problem(_place(path, error), _reason(error))]) from error
    finally:
        loader.dispose()


def _is_data(path: Path) -> Problem:
    message = f"this is data, not a configuration; name it in one: r1 … CONFIG.yaml data.train_files={path}"
    return Problem("config", message, str(path), COMMAND_LINE)


def read_tree(tree: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of a mapping of sections, such as `{"trainer": {"max_steps": 3}}`."""
    return [Setting(key, value, "null" if value is None else str(value), PYTHON) for key, value in flatten(tree)]


def read_words(words: Sequence[str]) -> list[Setting]:
    """Return the settings of words like `trainer.max_steps=3` or `+worker.reward.…=1`.

    Raises:
        ConfigError: a word without `=`, or brackets that do not close.
    """
    settings: list[Setting] = []
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if word.startswith("-"):
            hint = f": {word.lstrip('-')}" if equals else ", as key=value"
            problems.append(Problem(word, f"no such option; settings are written without dashes{hint}"))
        elif not equals or not key.strip("+ "):
            problems.append(Problem(word, "expected key=value, or a configuration file ending in .yaml"))
        else:
            try:
                settings += _read_word(key.strip(), text)
            except yaml.YAMLError as error:
                problems.append(Problem(key, f"not a YAML or JSON value: {_reason(error)}", text, COMMAND_LINE))
    if problems:
        raise ConfigError(problems)
    return settings


def _read_word(key: str, text: str) -> list[Setting]:
    added, name = key.startswith("+"), key.lstrip("+")
    if text.lstrip().startswith(("{{", "{%")):  # a Jinja template, not a mapping
        return [Setting(name, text, text, COMMAND_LINE, added)]
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if isinstance(node, yaml.MappingNode) and text.lstrip().startswith("{"):
            flat = _flatten(loader, node, f"{name}.", None)
            return [Setting(s.key, s.value, s.raw, COMMAND_LINE, added) for s in flat] or [
                Setting(name, {}, text, COMMAND_LINE, added)
            ]
        is_prose = isinstance(node, yaml.MappingNode)  # such as `Think: then answer`
        value = text if is_prose else None if node is None else loader.construct_document(node)
        raw = value if isinstance(value, str) and text.lstrip()[:1] in {"'", '"'} else text
        return [Setting(name, value, raw, COMMAND_LINE, added)]
    except yaml.YAMLError:
        if text.lstrip()[:1] in {"{", "["}:
            raise
        return [Setting(name, text, text, COMMAND_LINE, added)]  # free text such as `@x` or `50% done: go`
    finally:
        loader.dispose()


def _flatten(loader: Loader, node: yaml.MappingNode, prefix: str, file: str | None) -> Iterator[Setting]:
    _refuse_repeats(node, prefix, file)
    loader.flatten_mapping(node)
    for name_node, value_node in node.value:
        key = prefix + str(loader.construct_object(name_node, deep=True))
        origin = f"{file}:{name_node.start_mark.line + 1}" if file else COMMAND_LINE
        if isinstance(value_node, yaml.MappingNode) and value_node.value:
            yield from _flatten(loader, value_node, f"{key}.", file)
        else:
            value = loader.construct_object(value_node, deep=True)
            raw = value_node.value if isinstance(value_node, yaml.ScalarNode) else str(value)
            yield Setting(key, value, raw, origin)


def _refuse_repeats(node: yaml.MappingNode, prefix: str, file: str | None) -> None:
    seen: dict[str, int] = {}
    for name_node, _ in node.value:
        line = name_node.start_mark.line + 1
        if name_node.value != "<<" and name_node.value in seen:
            key, first = prefix + str(name_node.value), seen[name_node.value]
            where = f"{file}:{line}" if file else COMMAND_LINE
            raise ConfigError([Problem(key, f"given twice, first on line {first}", None, where)])
        seen[str(name_node.value)] = line


def _place(path: Path, error: yaml.YAMLError) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return f"{path}:{mark.line + 1}" if mark else str(path)


def _reason(error: yaml.YAMLError) -> str:
    problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else None
    return str(problem or error)
