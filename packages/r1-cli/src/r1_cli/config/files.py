"""Whether the files that a configuration names are there: templates, reward functions, rows, models."""

import ast
import json
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from r1_cli.config.data import DataConfig
from r1_cli.config.root import RunConfig
from r1_cli.config.sources import Source, count_rows, training_sources, validation_sources
from r1_core.catalogue import own_needs
from r1_data.types import DataError
from r1_rewards.service import check_settings
from r1_rewards.spec import SERVICES, RewardSpec, RewardSpecError, check_options, describe, parse_spec


def file_problems(config: RunConfig, command: str) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each named file that cannot be used; nothing is imported or run."""
    data, model, reward = config.data, config.worker.actor.model, config.worker.reward
    yield from _template("data.format_prompt", data.format_prompt)
    if not _is_template(data.override_chat_template):
        yield from _template("data.override_chat_template", data.override_chat_template)
    yield from _folder("data.image_dir", data.image_dir)
    for sources in ([] if command == "eval" else training_sources(data), validation_sources(data)):
        for source in sources:
            yield from _source(source, data)
    for key, name in (
        ("worker.actor.model.model_path", model.model_path),
        ("worker.actor.model.tokenizer_path", model.tokenizer_path),
    ):
        if name and names_folder(name) and not Path(name).is_dir():
            yield key, f"no such folder{where_or_near(name)}"
    checkpoint = config.trainer.load_checkpoint_path
    if checkpoint and not Path(checkpoint).is_dir():
        yield "trainer.load_checkpoint_path", f"no such folder{where_or_near(checkpoint)}"
    if command == "train":
        yield from _save_path(config.trainer.checkpoint_folder)
    yield from _model(config)
    keys = "worker.reward.reward_function", "worker.reward.reward_function_kwargs"
    yield from _reward(keys, reward.reward_function, reward.reward_function_kwargs)
    if reward.reward_type == "sequential" and reward.reward_function:
        yield from _sequential(reward.reward_function)
    yield from _function("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from _function("worker.actor.loss_type", config.worker.actor.loss_type)


def _save_path(folder: Path) -> Iterator[tuple[str, str]]:
    """Check that the nearest folder there is can be written to; nothing is created."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        yield "trainer.save_checkpoint_path", f"{folder} cannot be made: {there} is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield "trainer.save_checkpoint_path", f"{folder} cannot be written: you may not write to {there}"


def _model(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Check a local model's own configuration: that it is there, and that a response has room in its positions."""
    folder = Path(config.worker.actor.model.model_path or "")
    if not config.worker.actor.model.model_path or not folder.is_dir():
        return
    try:
        found = json.loads((folder / "config.json").read_text("utf-8")) | config.worker.actor.model.override_config
    except FileNotFoundError:
        hint = " (a checkpoint's model is in its folder actor)" if (folder / "actor").is_dir() else ""
        yield "worker.actor.model.model_path", f"the folder has no config.json{hint}"
        return
    except (OSError, ValueError, TypeError) as error:
        yield "worker.actor.model.model_path", f"its config.json cannot be read ({error})"
        return
    text = found.get("text_config") or {}
    positions = found.get("max_position_embeddings", text.get("max_position_embeddings"))
    scaled = _stretches_positions(found) or _stretches_positions(text)
    longest = config.data.max_response_length
    if isinstance(positions, int) and not scaled and longest >= positions:
        yield "data.max_response_length", f"has no room: the model has {positions} positions, the prompt's included"


def _stretches_positions(part: Mapping[str, Any]) -> bool:
    rope = part.get("rope_scaling") or part.get("rope_parameters") or {}
    return rope.get("rope_type", rope.get("type", "default")) not in ("default", "mrope")


def reads_media(config: RunConfig) -> bool:
    """Whether worker processes are wanted and the model, if it is a local folder, has a vision part."""
    file = Path(config.worker.actor.model.model_path or "") / "config.json"
    wanted = config.data.filter_overlong_prompts_workers != 1 and file.is_file()
    return wanted and "vision_config" in json.loads(file.read_text("utf-8"))


def _function(key: str, name: str) -> Iterator[tuple[str, str]]:
    """Check a user's `file.py:function`; a bare name is one of ours."""
    path, colon, function = name.rpartition(":")
    if not colon:
        return
    if not Path(path).is_file():
        yield key, f"no such file{where_or_near(path)}"
        return
    try:
        tree = _parse(Path(path))
    except ValueError as error:
        yield key, str(error)
        return
    names, is_complete = _top_level_names(tree)
    if function not in names and is_complete:
        yield key, f"{path} defines no {function}" + describe(function, _functions(tree))
    try:
        own_needs(Path(path), function)
    except ValueError as error:
        yield key, str(error)


def _source(source: Source, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Check what one source names of its own. Findings name the key that exists, and the entry in the message."""
    key = source.key.partition("[")[0]
    where = "" if source.key == key else f"{source.key.removeprefix(key)}: "
    findings: list[tuple[str, str]] = [*_rows(key, source)]
    if source.format_prompt != data.format_prompt:
        findings += _template(key, source.format_prompt)
    if source.image_dir != data.image_dir:
        findings += _folder(key, source.image_dir)
    findings += _reward((key, key), source.reward_function, source.reward_function_kwargs)
    yield from ((key, where + message) for key, message in findings)


def _rows(key: str, source: Source) -> Iterator[tuple[str, str]]:
    try:
        count_rows([source])
    except DataError as error:
        yield key, str(error)


def _folder(key: str, name: str | None) -> Iterator[tuple[str, str]]:
    if name and not Path(name).is_dir():
        yield key, f"no such folder{where_or_near(name)}"


def _is_template(name: str | None) -> bool:
    return bool(name) and any(mark in str(name) for mark in ("{{", "{%", "\n"))


def _template(key: str, name: str | None) -> Iterator[tuple[str, str]]:
    if _is_template(name):
        yield key, "is the text of a template; save it in a file and name the file"
    elif name and not Path(name).is_file():
        yield key, f"no such file{where_or_near(name)}"


def _reward(keys: tuple[str, str], name: str | None, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
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
        yield keys[0], f"{spec.path} defines no {spec.function}" + describe(spec.function, functions)
    takes = _keywords(tree, spec.function)
    for word in kwargs:
        if takes is not None and word not in takes:
            yield keys[1], f"{spec.path}:{spec.function} takes no {word!r}" + describe(word, takes)


def _parse(path: Path) -> ast.Module:
    """Return a Python file's syntax. Raises ValueError, with path and line, for a file that is not Python."""
    try:
        return ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        where = f"{path}, line {error.lineno}" if error.lineno else str(path)
        raise ValueError(f"{where}: {error.msg}; correct the file") from error
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as Python: {error}") from error


def _functions(tree: ast.Module) -> list[str]:
    """Return the names of the functions that a file itself defines, private ones left out."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return sorted({node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")})


def _keywords(tree: ast.Module, function: str) -> list[str] | None:
    """Return what the function may be given by name; None where its text does not tell."""
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function]
    if len(found) != 1 or found[0].decorator_list or found[0].args.kwarg:
        return None
    arguments = found[0].args
    return [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]


def _sequential(name: str) -> Iterator[tuple[str, str]]:
    """An older configuration calls the reward sequential; today its file says so."""
    try:
        path = parse_spec(name).path
        names = _top_level_names(_parse(path))[0] if path else {"REWARD_TYPE"}
    except ValueError:
        return  # said where the reward itself is checked
    if "REWARD_TYPE" not in names:
        yield "worker.reward.reward_type", f'add the line REWARD_TYPE = "sequential" to {path}'


def _reward_settings(spec: RewardSpec, key: str, kwargs: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    try:
        if spec.function in SERVICES:
            check_settings(spec, kwargs)
        else:
            check_options(spec.function, kwargs)
    except RewardSpecError as error:
        yield key, str(error)


def _top_level_names(tree: ast.Module) -> tuple[set[str], bool]:
    """Return the names a module defines, and whether these are all (no `from … import *`, no names bound in blocks)."""
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
    """Return a near name in the same folder, or where the path was looked for."""
    path = Path(name)
    near = get_close_matches(path.name, _names_in(path.parent), n=1, cutoff=0.6)
    return f"; did you mean {path.parent / near[0]}?" if near else f" (working directory: {Path.cwd()})"


def names_folder(name: str) -> bool:
    """Return whether a model's name can only be a folder's: a hub's has one slash at most."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
