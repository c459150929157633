"""Names of estimators, losses and other choices, and the settings of each, read from their files without torch.

Every module of `advantages/` and `losses/` with a class that has `names` adds an entry: a new file is enough.
"""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, Union

from r1_core import settings as ranges
from r1_core.needs import read_needs

T = TypeVar("T")

PACKAGE = Path(__file__).parent
NAME = re.compile(r"[a-z][a-z0-9_]*")
# What the type of a setting may be made of.
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "tuple": tuple, "Literal": Literal}
TYPES |= {name: value for name, value in vars(ranges).items() if hasattr(value, "__metadata__")}


class Registry(Generic[T]):
    """A table from name to entry; `kind` names its entries in error messages."""

    def __init__(self, kind: str, entries: Mapping[str, T]) -> None:
        self.kind = kind
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str) -> Callable[[T], T]:
        """Add an entry. Raises ValueError if the name is taken."""

        def add(entry: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str) -> T:
        """Return an entry. Raises ValueError with the known names if there is none."""
        if name not in self._entries:
            near = get_close_matches(name, self._entries, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no {self.kind} is called {name!r} (there are: {', '.join(self._entries)}){hint}")
        return self._entries[name]


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of an estimator or a loss: a field of its dataclass."""

    name: str
    type: Any  # such as `float`, `Positive`, `Literal["a", "b"]`, `tuple[float, float] | None`
    default: Any
    help: str  # the comment behind it


@dataclass(frozen=True, slots=True)
class Entry:
    """What an estimator's or a loss's class declares.

    Example: `Entry(("grpo",), "r1_core.advantages.grpo:GRPO", ("groups",), False, "token", (Setting("norm_by_std",
    bool, True, "…"), …), "GRPO advantages: each answer compared with the other answers to the same prompt.")`
    """

    names: tuple[str, ...]  # the first is its own, the others mean the same
    where: str  # `module:Class`
    needs: tuple[str, ...]  # words of `r1_core.needs`
    token_wise: bool  # of a loss
    aggregation: str  # of a loss: the one that it is meant for
    settings: tuple[Setting, ...]
    help: str  # the first line of its module

    def load(self) -> Any:
        module, _, name = self.where.partition(":")
        return getattr(import_module(module), name)


@cache
def estimators() -> Mapping[str, Entry]:
    return _scan("advantages")


@cache
def losses() -> Mapping[str, Entry]:
    return _scan("losses")


def own_needs(path: Path, name: str) -> tuple[str, ...] | None:
    """Return the `needs` that a user's function or class declares, read from its file; None if it declares none.

    Raises ValueError on an unknown need, OSError or SyntaxError if the file cannot be read.
    """
    for node in ast.parse(path.read_bytes(), str(path)).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            value = _attributes(node).get("needs")
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == f"{name}.needs":
            value = node.value
        else:
            continue
        if value is not None:
            return read_needs(_literal(value, path), f"{path}:{name}")
    return None


def _scan(folder: str) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        for entry in _read(path, f"r1_core.{folder}.{path.stem}"):
            for name in entry.names:
                if name in found:
                    raise ValueError(f"{entry.where} and {found[name].where} are both named {name!r}")
                found[name] = entry
    return found


def _read(path: Path, module: str) -> Iterator[Entry]:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    aliases = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in tree.body:
        attributes = _attributes(node) if isinstance(node, ast.ClassDef) else {}
        if not isinstance(node, ast.ClassDef) or "names" not in attributes:
            continue
        said = {
            word: _literal(attributes[word], path)
            for word in ("names", "needs", "token_wise", "aggregation")
            if word in attributes
        }
        names = said["names"]
        if not (isinstance(names, tuple) and all(isinstance(name, str) and NAME.fullmatch(name) for name in names)):
            raise ValueError(f"{path}:{node.name}: names is {names!r}; write a tuple such as ({node.name.lower()!r},)")
        if names:
            yield Entry(
                names,
                f"{module}:{node.name}",
                read_needs(said.get("needs", ()), f"{path}:{node.name}"),
                said.get("token_wise", False),
                said.get("aggregation", "token"),
                tuple(_settings(node, aliases, text.splitlines(), path)),
                (ast.get_docstring(tree) or "").partition("\n")[0],
            )


def _attributes(node: ast.ClassDef) -> dict[str, ast.expr]:
    return {
        line.targets[0].id: line.value
        for line in node.body
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name)
    }


def _settings(node: ast.ClassDef, aliases: Mapping[str, ast.expr], lines: list[str], path: Path) -> Iterator[Setting]:
    for line in node.body:
        if not isinstance(line, ast.AnnAssign) or "ClassVar" in ast.unparse(line.annotation):
            continue
        name = ast.unparse(line.target)
        if line.value is None:
            raise ValueError(f"{path}:{line.lineno}: the setting {name!r} has no default")
        comment = lines[line.end_lineno - 1 if line.end_lineno else line.lineno - 1].partition("  # ")[2]
        yield Setting(name, _type(line.annotation, aliases, path), _literal(line.value, path), comment)


def _type(node: ast.expr, aliases: Mapping[str, ast.expr], path: Path) -> Any:
    if isinstance(node, ast.Name) and node.id in TYPES:
        return TYPES[node.id]
    if isinstance(node, ast.Name) and node.id in aliases:
        return _type(aliases[node.id], aliases, path)
    if isinstance(node, ast.Constant) and node.value in (None, Ellipsis):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return Union[_type(node.left, aliases, path), _type(node.right, aliases, path)]  # noqa: UP007 (values)
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        base = _type(node.value, aliases, path)
        if base is Literal:
            return Literal[tuple(_literal(part, path) for part in parts)]
        return base[tuple(_type(part, aliases, path) for part in parts)]
    known = f"there are {', '.join(TYPES)}, and | None"
    raise ValueError(f"{path}:{node.lineno}: {ast.unparse(node)} is no type of a setting; {known}")


def _literal(node: ast.expr, path: Path) -> Any:
    if ast.unparse(node) == "math.inf":
        return math.inf
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise ValueError(f"{path}:{node.lineno}: {ast.unparse(node)} must be written out as a literal") from None
