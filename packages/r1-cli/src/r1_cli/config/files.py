"""Check the files that a configuration names, without importing or running them."""

import ast
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from os.path import isdir, isfile
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from r1_cli.config.problems import KeyProblem
from r1_cli.config.section import UserPath
from r1_core.registry import own_needs
from r1_rewards.spec import SERVICES, RewardSpec, check_options, check_settings, parse_spec
from r1_rewards.types import RewardSpecError, suggest


def folder_problems(key: str, name: str | None) -> Iterator[KeyProblem]:
    if name and not isdir(name):
        yield key, f"no such folder{where_or_near(name)}"


def is_template_text(name: str | None) -> bool:
    return bool(name) and any(mark in str(name) for mark in ("{{", "{%", "\n"))


def template_problems(key: str, name: str | None) -> Iterator[KeyProblem]:
    if is_template_text(name):
        yield key, "is the text of a template; save it in a file and name the file"
    elif name and not isfile(name):
        yield key, f"no such file{where_or_near(name)}"


def definition_problems(key: str, name: str) -> Iterator[KeyProblem]:
    """Check that a user's `file.py:name` is defined there."""
    path, _, defined = name.rpartition(":")
    if not isfile(path):
        yield key, f"no such file{where_or_near(path)}"
        return
    try:
        tree = _parse(Path(path))
    except ValueError as error:
        yield key, str(error)
        return
    names, is_complete = _top_level_names(tree)
    if defined not in names and is_complete:
        yield key, f"{path} defines no {defined}" + suggest(defined, _definitions(tree))


def function_problems(key: str, name: str) -> Iterator[KeyProblem]:
    """Check a user's `file.py:function`; other names are ours."""
    path, colon, function = name.rpartition(":")
    if not colon:
        return
    found = list(definition_problems(key, name))
    yield from found
    try:
        if not found:
            own_needs(Path(path), function)
    except ValueError as error:
        yield key, str(error)


def reward_problems(keys: tuple[str, str], name: str | None, kwargs: Mapping[str, object]) -> Iterator[KeyProblem]:
    if not name:
        return
    try:
        spec = parse_spec(name)
        tree = _parse(spec.path) if spec.path else None
    except ValueError as error:  # RewardSpecError is one
        yield keys[0], str(error)
        return
    if tree is None:
        yield from _reward_settings(spec, keys[1], kwargs)
        return
    names, is_complete = _top_level_names(tree)
    if spec.function not in names and is_complete:
        functions = _functions(tree)
        if spec.function == "main":
            there = f"; it defines {', '.join(functions)}" if functions else ""
            yield keys[0], f"names no function of {spec.path}, which has no main: write {spec.path}:NAME{there}"
            return
        yield keys[0], f"{spec.path} defines no {spec.function}" + suggest(spec.function, functions)
    takes = _keywords(tree, spec.function)
    for word in kwargs:
        if takes is not None and word not in takes:
            yield keys[1], f"{spec.path}:{spec.function} takes no {word!r}" + suggest(word, takes)


def _parse(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else str(path)
        raise ValueError(f"{where}: {error.msg}; correct the file") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as Python: {error}") from error


def _definitions(tree: ast.Module) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return sorted({node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")})


def _functions(tree: ast.Module) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return sorted({node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")})


def _keywords(tree: ast.Module, function: str) -> list[str] | None:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if len(found) != 1 or found[0].decorator_list or found[0].args.kwarg:
        return None
    arguments = found[0].args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def sequential_problems(name: str) -> Iterator[KeyProblem]:
    try:
        path = parse_spec(name).path
        names = _top_level_names(_parse(path))[0] if path else {"REWARD_TYPE"}
    except ValueError:
        return  # reported by `reward_problems`
    if "REWARD_TYPE" not in names:
        yield "worker.reward.reward_type", f'add the line REWARD_TYPE = "sequential" to {path}'


def _reward_settings(spec: RewardSpec, key: str, kwargs: Mapping[str, object]) -> Iterator[KeyProblem]:
    try:
        if spec.function in SERVICES:
            check_settings(spec, kwargs)
        else:
            check_options(spec.function, kwargs)
    except RewardSpecError as error:
        yield key, str(error)


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Return the names that a module defines, and whether there are no others."""
    names: set[str] = set()
    is_complete = True
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            leaves = (leaf for leaf in ast.walk(node) if isinstance(leaf, ast.Name))
            names |= {leaf.id for leaf in leaves if isinstance(leaf.ctx, ast.Store)}
        elif not isinstance(node, ast.Expr | ast.Pass):
            is_complete = False
    return names, is_complete and "*" not in names


def where_or_near(name: str) -> str:
    path = Path(name)
    if isfile(path):
        return ", but a file"
    near = get_close_matches(path.name, _names_in(path.parent), n=1, cutoff=0.6)
    return f"; did you mean {path.parent / near[0]}?" if near else f" (working directory: {Path.cwd()})"


def find_model_folder(name: str) -> str:
    """Return the model's folder if `name` is a checkpoint of r1, or a merged one of EasyR1 or veRL; else `name`."""
    folder = Path(name)
    if isfile(folder / "config.json") or not isdir(folder / "actor"):
        return name
    merged = folder / "actor/huggingface"
    of_shards = not isfile(folder / "actor/config.json") and any(merged.glob("*.safetensors"))
    return str(merged if of_shards else folder / "actor")


ModelPath = Annotated[UserPath, AfterValidator(find_model_folder)]


def names_folder(name: str) -> bool:
    """Whether a model's name must be a folder; hub names have at most one slash."""
    return name.startswith(("/", "./", "../", "~")) or (name.count("/") > 1 and not is_url(name))


def is_url(path: str) -> bool:
    return "://" in path


def has_password(url: str) -> bool:
    return is_url(url) and "@" in url.partition("://")[2].partition("/")[0]


PASSWORD = "a URL with a password ends up in logs; put the secret into the environment"


def _names_in(folder: Path) -> list[str]:
    return os.listdir(folder) if isdir(folder) and os.access(folder, os.R_OK) else []
