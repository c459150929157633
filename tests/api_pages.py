"""Generate the API reference of docs/api from the sources: signatures, fields and docstrings of all public names."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from reference_pages import NOTE, ROOT, cell, prose

PACKAGES = ("r1_core", "r1_rollout", "r1_rewards", "r1_data", "r1_cli")
HEADS = re.compile(r"(Args|Returns|Raises|Yields):$")
ITEM = re.compile(r"([*\w., `]+?): (.*)")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def api_pages() -> dict[str, str]:
    """Return every page of docs/api by its path in the repository."""
    lines = ["# API reference", "", NOTE, "", "The public names of each package, with their docstrings.", ""]
    found = {}
    for package in PACKAGES:
        module, title = import_module(package), package.replace("_", "-")
        text = [f"# {package}", "", NOTE, "", *docstring(inspect.getdoc(module) or ""), ""]
        for name in public_names(module):
            text += [f"## {name}", "", *entry(package, name), ""]
        found[f"docs/api/{title}.md"] = (
            re.sub(r"\n{3,}", "\n\n", "\n".join([*text, *verifiers(package)])).rstrip() + "\n"
        )
        lines.append(f"- [{title}]({title}.md): {prose((inspect.getdoc(module) or '').split(chr(10))[0])}")
    return {"docs/api/index.md": "\n".join(lines) + "\n", **found}


def public_names(module: ModuleType) -> list[str]:
    """Return the names of a package that are no modules; `r1_cli.open` is public and not in `__all__`."""
    extra = ["open"] if module.__name__ == "r1_cli" else []
    return sorted([*module.__all__, *extra], key=str.lower)


def verifiers(package: str) -> Iterator[str]:
    if package == "r1_rewards":
        yield "## Modules"
        yield ""
        yield "Each [built-in verifier](../rewards.md) is a module with `score(response, ground_truth)`, such as"
        yield "`r1_rewards.math`; `r1_rewards.extract` has what they read answers with."


# One name


def entry(package: str, name: str) -> Iterator[str]:
    value = getattr(import_module(package), name)
    node, file = definition(package, name, value)
    path = file.relative_to(ROOT).as_posix()
    where = f"[`{path}`](../../{path})"
    if isinstance(node, ast.ClassDef):
        yield f"A class of {where}."
        yield ""
        yield from docstring(ast.get_docstring(node) or "")
        yield from fields(value)
        yield from methods(value)
    elif isinstance(node, Function):
        yield f"`{signature(node, name)}`"
        yield ""
        yield f"A function of {where}."
        yield ""
        yield from docstring(ast.get_docstring(node) or "")
    else:
        yield f"`{ast.unparse(node)}`"
        yield ""
        yield f"{prose(comment(node, file)).rstrip('.')}. In {where}."


def definition(package: str, name: str, value: Any) -> tuple[ast.stmt, Path]:
    """Return the statement that defines a public name, and its file."""
    if inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):
        value = inspect.unwrap(value)
        file, named = Path(str(inspect.getsourcefile(value))), value.__name__
    else:  # a constant or an alias, in the module that the package imports it from
        root = tree(Path(str(import_module(package).__file__)))
        modules = {
            one.asname or one.name: str(node.module)
            for node in ast.walk(root)
            if isinstance(node, ast.ImportFrom)
            for one in node.names
        }
        file, named = Path(str(import_module(modules[name]).__file__)), name
    for node in tree(file).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if getattr(node, "name", "") == named or named in [ast.unparse(target) for target in targets]:
            return node, file
    raise LookupError(f"{file} does not define {named}")


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def comment(node: ast.stmt, file: Path) -> str:
    """Return the comment behind a statement, or else that on the lines above it."""
    lines, above = file.read_text(encoding="utf-8").splitlines(), list[str]()
    for line in reversed(lines[: node.lineno - 1]):
        if not line.strip().startswith("# "):
            break
        above.insert(0, line.strip()[2:])
    return lines[(node.end_lineno or 0) - 1].partition("  # ")[2] or " ".join(above)


def signature(node: Function, name: str) -> str:
    """Return a call as it is declared, without `self`."""
    arguments = ast.unparse(node.args).removeprefix("self").removeprefix("cls").removeprefix(", ").removeprefix("/, ")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    return f"{name}({arguments}){returns}"


def fields(kind: type) -> Iterator[str]:
    """A table of a class's declared fields, those of r1's base classes included, with the comments behind them."""
    rows: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in PACKAGES:
            continue
        node, file = class_node(base)
        for one in node.body:
            if not isinstance(one, ast.AnnAssign) or not isinstance(one.target, ast.Name) or one.target.id[0] == "_":
                continue
            default = f"`{ast.unparse(one.value)}`" if one.value else ""
            cells = f"`{one.target.id}`", f"`{ast.unparse(one.annotation)}`", default, prose(comment(one, file))
            rows[one.target.id] = f"| {' | '.join(map(cell, cells))} |"
    if rows:
        yield from ("| field | type | default | meaning |", "|---|---|---|---|", *rows.values(), "")


def methods(kind: type) -> Iterator[str]:
    """The public methods of a class with docstrings, those of r1's base classes included."""
    found: dict[str, tuple[Function, str]] = {}
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in PACKAGES:
            continue
        for one in class_node(base)[0].body:
            if isinstance(one, Function) and (not one.name.startswith("_") or one.name in ("__init__", "__call__")):
                found.setdefault(one.name, (one, ast.get_docstring(one) or ""))
    for name, (node, text) in found.items():
        if text:
            is_property = any(ast.unparse(one).endswith("property") for one in node.decorator_list)
            call = (
                name if is_property else signature(node, {"__init__": kind.__name__, "__call__": "()"}.get(name, name))
            )
            yield f"**`{call.replace('()(', '(')}`**"
            yield ""
            yield from docstring(text)


def class_node(kind: type) -> tuple[ast.ClassDef, Path]:
    file = Path(str(inspect.getsourcefile(kind)))
    (node,) = [one for one in tree(file).body if isinstance(one, ast.ClassDef) and one.name == kind.__name__]
    return node, file


# Text


def docstring(text: str) -> Iterator[str]:
    """A docstring as Markdown: paragraphs, lists, and sections such as `Args:` as lists."""
    for part in text.split("\n\n"):
        head, *rest = part.split("\n")
        if not part.strip():
            continue
        if HEADS.match(head.strip()):
            yield f"*{head.strip(': ')}*"
            yield ""
            yield from map(item, joined(textwrap.dedent("\n".join(rest)).splitlines()))
        elif head.lstrip().startswith(("- ", "1. ")):
            yield from (prose(line) for line in joined(part.splitlines()))
        else:
            yield prose(" ".join(part.split()))
        yield ""


def joined(lines: list[str]) -> list[str]:
    """Return the items of a list, whose further lines are indented."""
    found: list[str] = []
    for line in lines:
        if line.startswith(" ") and found:
            found[-1] += f" {line.strip()}"
        else:
            found.append(line)
    return found


def item(text: str) -> str:
    named = ITEM.fullmatch(text)
    return f"- `{named[1]}`: {prose(named[2])}" if named else f"- {prose(text)}"
