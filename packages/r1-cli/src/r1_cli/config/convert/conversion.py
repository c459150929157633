"""What every conversion does: settings of another trainer become ours, and what is lost or changes is told."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from r1_cli.config.root import MASK, SECRET
from r1_cli.config.schema import schema
from r1_cli.config.section import Tree
from r1_cli.config.settings import Loader


class OthersLoader(Loader):
    """YAML as other trainers read it: `none` is text, as in TRL's `scale_rewards: none`; `null` and `None` are null."""


OthersLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if not tag.endswith(":null")]
    for first, found in Loader.yaml_implicit_resolvers.items()
}
OthersLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"^(?:~|[Nn]ull|NULL|None|)$"), ["~", *"nN", ""]
)


@dataclass
class Conversion:
    """The settings of another trainer on their way to ours.

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

    def take(self, name: str) -> Any:
        """Return what is given, else the trainer's default, else None; from now on `name` counts as known.

        Raises ValueError where a number or a list is the default, and something else is given.
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

    def take_under(self, name: str) -> Tree:
        """Return what is given below a name, as `{"x": 1}` of `name.x=1`."""
        inside = [key for key in self.given if key.startswith(f"{name}.")]
        return (self.take(name) or {}) | {key.removeprefix(f"{name}."): self.take(key) for key in inside}

    def rename(self, keys: Mapping[str, str]) -> None:
        """Give settings, but for those that are null, the names that they have here."""
        for name, key in keys.items():
            if (value := self.take(name)) is not None:
                self.settings[key] = value

    def lose(self, reasons: Mapping[str, str]) -> None:
        """Say why settings have no counterpart, where one asks for something that is no default."""
        for name, why in reasons.items():
            value = self.take(name)
            if name in self.given and value not in (None, False, "", [], {}) and value != self.defaults.get(name):
                self.lost.append(f"{_shown(name, value)}: {why}")

    def left(self) -> list[str]:
        """Return the names, given or of a default, that nobody has read yet."""
        return [name for name in {**self.given, **self.defaults} if name not in self._read]

    def unknown(self) -> list[str]:
        """Return what was given and never read."""
        return [_shown(name, value) for name, value in self.given.items() if name not in self._read]

    def whole_prompts(self, key: str, sequences: int, answers: int, told: str) -> None:
        """Set a batch size in prompts from one in sequences; one that is no whole number is rounded up, and told."""
        prompts, rest = divmod(sequences, answers)
        self.settings[key] = max(1, prompts + bool(rest))
        if rest or not prompts:
            self.remarks.append(f"{told}: {sequences} sequences are no whole prompts of {answers} answers, {key} is")
            self.remarks[-1] += f" {self.settings[key]}"

    def text(self) -> str:
        """Return the configuration as YAML, what is to be known above it as comments; what is unknown in one line."""
        lines = [f"# Converted from {self.trainer} by r1 convert. Keys that are not here have r1's defaults."]
        for title, told in (
            ("No counterpart", self.lost),
            ("Unknown, and left out", [", ".join(self.unknown())] if self.unknown() else []),
            ("To be known", self.remarks),
        ):
            lines += [f"# {title}:", *(f"#   {' '.join(line.split())}" for line in told)] if told else []
        return "\n".join([*lines, yaml.safe_dump(self.tree(), sort_keys=False, allow_unicode=True, width=1000)])

    def tree(self) -> Tree:
        """Return the settings as nested sections, in the order of the schema."""
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
    """Return `name=value`, a key or a token masked."""
    return f"{name}={MASK if SECRET.search(name.lstrip('-')) and value else value}"
