"""Whether the files that a configuration names are there: templates, reward functions, rows, models."""

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from r1_cli.config.root import RunConfig
from r1_cli.config.rows import count_rows
from r1_data.types import DataError
from r1_rewards.spec import RewardSpecError, describe, parse_spec


def file_problems(config: RunConfig, command: str) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each named file that cannot be used; nothing is imported or run."""
    data, model = config.data, config.worker.actor.model
    yield from _template("data.format_prompt", data.format_prompt)
    yield from _template("data.override_chat_template", data.override_chat_template)
    if data.image_dir and not Path(data.image_dir).is_dir():
        yield "data.image_dir", f"no such folder{_hint(data.image_dir)}"
    for key, spec in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        if spec and (command == "train" or key == "data.val_files"):
            yield from _rows(key, spec)
    for key, name in (
        ("worker.actor.model.model_path", model.model_path),
        ("worker.actor.model.tokenizer_path", model.tokenizer_path),
    ):
        if name and (name.startswith(("/", "./", "../", "~")) or name.count("/") > 1) and not Path(name).is_dir():
            yield key, f"no such folder{_hint(name)}"
    checkpoint = config.trainer.load_checkpoint_path
    if checkpoint and not Path(checkpoint).is_dir():
        yield "trainer.load_checkpoint_path", f"no such folder{_hint(checkpoint)}"
    yield from _reward(config)
    yield from _function("algorithm.adv_estimator", config.algorithm.adv_estimator)
    yield from _function("worker.actor.loss_type", config.worker.actor.loss_type)


def _function(key: str, name: str) -> Iterator[tuple[str, str]]:
    """Check a user's `file.py:function`; a bare name is one of ours."""
    path, colon, function = name.rpartition(":")
    if not colon:
        return
    if not Path(path).is_file():
        yield key, f"no such file{_hint(path)}"
        return
    try:
        names, is_complete = _top_level_names(ast.parse(Path(path).read_bytes()))
    except (SyntaxError, ValueError) as error:
        yield key, f"{path} cannot be read as Python ({error})"
        return
    if function not in names and is_complete:
        yield key, f"{path} defines no {function}" + describe(function, [n for n in names if not n.startswith("_")])


def _template(key: str, name: str | None) -> Iterator[tuple[str, str]]:
    if name and ("{{" in name or "\n" in name):
        yield key, "is the text of a template; save it in a file and name the file"
    elif name and not Path(name).is_file():
        yield key, f"no such file{_hint(name)}"


def _rows(key: str, spec: str | list[str]) -> Iterator[tuple[str, str]]:
    try:
        count_rows(spec)
    except DataError as error:
        yield key, str(error)


def _reward(config: RunConfig) -> Iterator[tuple[str, str]]:
    reward, key = config.worker.reward, "worker.reward.reward_function"
    if not reward.reward_function:
        return
    try:
        spec = parse_spec(reward.reward_function)
        tree = ast.parse(spec.path.read_bytes()) if spec.path else None
    except (RewardSpecError, SyntaxError, ValueError) as error:
        yield key, str(error)
        return
    if tree is None:
        if reward.reward_function_kwargs:
            yield "worker.reward.reward_function_kwargs", f"the built-in reward {spec.function} takes none"
        return
    names, is_complete = _top_level_names(tree)
    if spec.function not in names and is_complete:
        functions = [name for name in names if not name.startswith("_") and not name.isupper()]
        yield key, f"{spec.path} defines no {spec.function}" + describe(spec.function, functions)
    if reward.reward_type == "sequential" and "REWARD_TYPE" not in names:
        yield "worker.reward.reward_type", f'add the line REWARD_TYPE = "sequential" to {spec.path}'


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


def _hint(name: str) -> str:
    """Return a near name in the same folder, or where the path was looked for."""
    path = Path(name)
    near = get_close_matches(path.name, _names_in(path.parent), n=1, cutoff=0.6)
    return f"; did you mean {path.parent / near[0]}?" if near else f" (working directory: {Path.cwd()})"


def _names_in(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
