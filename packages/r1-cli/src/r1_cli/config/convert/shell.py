"""Read the arguments of a command, typed or in a shell script."""

import os
import re
import shlex
from typing import Any

import yaml

from r1_cli.config.problems import SECRET
from r1_cli.config.section import Tree
from r1_cli.config.settings import Loader

ENDS = re.compile(r"^(?:[;|&]+|\d?>.*|<.*(?<!>)|2>&1)$")  # of a command, within a line of shell; not `<|im_end|>`
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


def command_words(text: str, program: str) -> list[str]:
    """Return the arguments of the command that the regular expression `program` matches.

    Replaces variables that the script sets before, then those of the environment except secrets; others stay. Raises
    ValueError for quotes that do not close.
    """
    variables = {name: value for name, value in os.environ.items() if not SECRET.search(name)}
    words: list[str] = []
    lines = re.sub(r"\\\r?\n", " ", text).splitlines()
    for line in lines:
        if line.lstrip().startswith("#"):
            continue
        found = shlex.split(_fill(line, variables), comments=len(lines) > 1)
        names = found[1:] if found[:1] == ["export"] else found
        if len(names) == 1 and re.match(r"[A-Za-z_]\w*=", names[0]):
            name, _, value = names[0].partition("=")
            variables[name] = value
            continue
        at = next((index for index, word in enumerate(found) if re.fullmatch(program, word)), None)
        if at is not None:
            return _until_end(found[at + 1 :])
        words += found
    return _until_end(words)


def read_flags(words: list[str]) -> Tree:
    """Return the options by name: true without a value, one value, or a list.

    Example: `read_flags(["--bf16", "--adam_betas", "0.9", "0.95"]) == {"bf16": True, "adam_betas": [0.9, 0.95]}`
    """
    flags: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            flags[name] = [value] if equals else []
        elif name:
            flags[name].append(word)
        else:
            raise ValueError(f"{word!r} stands before the first option")
    read = {name: [read_value(value) for value in values] for name, values in flags.items()}
    return {name: True if not values else values[0] if len(values) == 1 else values for name, values in read.items()}


def read_value(text: str) -> Any:
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return text


def _fill(line: str, variables: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[0] if match[2] is None else match[2])

    return VARIABLE.sub(value, line)


def _until_end(words: list[str]) -> list[str]:
    end = next((index for index, word in enumerate(words) if ENDS.match(word)), len(words))
    return words[:end]
