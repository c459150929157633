"""The base of all conversions from another trainer's settings."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from r1_cli.config.problems import MASK, SECRET
from r1_cli.config.schema import schema
from r1_cli.config.section import Tree
from r1_cli.config.settings import Loader


class OthersLoader(Loader):
    """YAML as other trainers read it: `none` is text, as in TRL's `scale_rewards: none`."""


OthersLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":null")]
    for first, found in Loader.yaml_implicit_resolvers.items()
}
OthersLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|[Nn]ull|NULL|None|)$"), ["~", *"nN", ""]
)


@dataclass
class Conversion:
    """Settings of another trainer, and r1's in their place.

    Example: `c = Conversion("TRL", {"beta": 0.1, "fp8": True}, {"beta": 0.0})`; `c.rename({"beta":
    "algorithm.kl_coef"})`; then `c.settings == {"algorithm.kl_coef": 0.1}` and `c.unknown() == ["fp8=True"]`.
    """

    trainer: str
    given: Tree  # as the user has them
    defaults: Tree  # that trainer's own, where they matter
    settings: Tree = field(default_factory=dict)  # ours, by dotted keys
    remarks: list[str] = field(default_factory=list)  # what is meant otherwise here
    lost: list[str] = field(default_factory=list)  # what has no counterpart, and why
    _read: set[str] = field(default_factory=set)

    def read(self, name: str) -> Any:
        """Return the given value, else the trainer's default, else None, and mark `name` as known.

        Raises:
            ValueError: the default is a number or a list, and the given value is not.
        """
        self._read.add(name)
        default = self.defaults.get(name)
        value = self.given.get(name, default)
        if value is None or isinstance(default, bool):
            return value
        if isinstance(default, int | float) and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ValueError(f"{name}={value}: must be a number")
        if isinstance(default, list) and not isinstance(value, list):
            raise ValueError(f"{name}={value}: must be a list")
        return value

    def read_section(self, name: str) -> Tree:
        inside = [key for key in self.given if key.startswith(f"{name}.")]
        return (self.read(name) or {}) | {key.removeprefix(f"{name}."): self.read(key) for key in inside}

    def rename(self, keys: Mapping[str, str]) -> None:
        for name, key in keys.items():
            if (value := self.read(name)) is not None:
                self.settings[key] = value

    def report_lost(self, reasons: Mapping[str, str]) -> None:
        """Report settings without a counterpart, unless they have their default."""
        for name, why in reasons.items():
            value = self.read(name)
            if name in self.given and value not in (None, False, "", [], {}) and value != self.defaults.get(name):
                self.lost.append(f"{_shown(name, value)}: {why}")

    def skip_defaults(self, defaults: Mapping[str, object]) -> None:
        """Mark settings as known that have these values, which ask for nothing."""
        for name, default in defaults.items():
            if name in self.given and self.given[name] == default:
                self.read(name)

    def unread(self) -> list[str]:
        return [name for name in {**self.given, **self.defaults} if name not in self._read]

    def unknown(self) -> list[str]:
        return [_shown(name, value) for name, value in self.given.items() if name not in self._read]

    def set_prompts(self, key: str, sequences: int, answers: int, label: str) -> None:
        prompts, rest = divmod(sequences, answers)
        self.settings[key] = max(1, prompts + bool(rest))
        if rest or not prompts:
            self.remarks.append(f"{label}: {sequences} sequences are no whole prompts of {answers} answers, {key} is")
            self.remarks[-1] += f" {self.settings[key]}"

    def text(self) -> str:
        lines = [f"# Converted from {self.trainer} by r1 convert. Keys that are not here have r1's defaults."]
        for title, notes in (
            ("No counterpart", self.lost),
            ("Unknown, and left out", [", ".join(self.unknown())] if self.unknown() else []),
            ("To be known", self.remarks),
        ):
            lines += [f"# {title}:", *(f"#   {' '.join(line.split())}" for line in notes)] if notes else []
        return "\n".join([*lines, yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, width=1000)])

    def tree(self) -> Tree:
        order = [*schema().values, *schema().open_mappings]
        tree: Tree = {}
        for key in sorted(self.settings, key=lambda key: order.index(schema().open_mapping_above(key) or key)):
            *path, last = key.split(".")
            section = tree
            for name in path:
                section = section.setdefault(name, {})
            section[last] = self.settings[key]
        return tree


def _shown(name: str, value: object) -> str:
    return f"{name}={MASK if SECRET.search(name.lstrip('-')) and value else value}"
