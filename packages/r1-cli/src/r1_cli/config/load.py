"""Load defaults, file and command line as one validated `RunConfig`, with each value's origin."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from r1_cli.config.data import SourceConfig
from r1_cli.config.legacy import translate
from r1_cli.config.options import shared_key
from r1_cli.config.problems import ConfigError, Problem, Provenance
from r1_cli.config.root import RunConfig
from r1_cli.config.rules import Command, find_problems
from r1_cli.config.schema import choices, nearest_key, schema
from r1_cli.config.section import Tree, lookup
from r1_cli.config.settings import Setting, read_file, read_tree, read_words

# A configuration of `r1 train`: its file, a mapping of its sections, or the typed sections themselves.
Source: TypeAlias = "str | PathLike[str] | Mapping[str, Any] | RunConfig"

WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": "at least",
    "greater_than": "more than",
    "less_than_equal": "at most",
    "less_than": "less than",
}

# Copied from the actor if the user does not set them.
BATCH_SIZES = (
    "global_batch_size",
    "micro_batch_size_per_device_for_update",
    "micro_batch_size_per_device_for_experience",
)
MODEL = ("model_path", "override_config", "trust_remote_code")


def load_config(words: Sequence[str], *, command: Command | None = "train") -> tuple[RunConfig, Provenance]:
    """Read `config=FILE` (or a bare FILE) and `key=value` words; later words win, and words win over the file.

    Args:
        words: as typed after the command, e.g. `["config=run.yaml", "trainer.max_steps=3"]`.
        command: an evaluation needs neither training rows nor matching batch sizes. None: `sft` if that section is
            set, else `train`.

    Raises:
        ConfigError: lists all problems.
    """
    file, overrides = split_words(words)
    return _load(read_file(file) if file else [], file, overrides, command)


def load_source(source: Source, words: Sequence[str] = ()) -> tuple[RunConfig, Provenance]:
    """Check a configuration of a Python program as `load_config` checks one of `r1 train`, or of `r1 sft`.

    It is one of `r1 sft` if it sets a key of that section. `words` are `key=value`.

    Sections say by themselves which of their values were set.
    """
    if isinstance(source, str | PathLike):
        return load_config([f"config={fspath(source)}", *words], command=None)
    tree = source.model_dump(mode="json", exclude_unset=True) if isinstance(source, RunConfig) else source
    return _load(read_tree(tree), None, words, None)


def _load(
    settings: list[Setting], file: Path | None, overrides: Sequence[str], command: Command | None
) -> tuple[RunConfig, Provenance]:
    layers = [translate(layer) for layer in (settings, read_words(overrides))]
    merged, problems = _merge(layer.settings for layer in layers)
    provenance = Provenance(
        file,
        tuple(overrides),
        {setting.key: setting.origin for setting in merged.values()},
        tuple(dict.fromkeys(notice for layer in layers for notice in layer.notices)),
    )
    config, wrong = _validate(merged)
    problems += wrong
    if config is not None:
        config = follow_actor(config, provenance)
        command = command or ("sft" if provenance.is_set("sft") else "train")
        problems += find_problems(config, provenance, command)
    if problems or config is None:
        raise ConfigError(problems)
    return config, provenance


def follow_actor(config: RunConfig, provenance: Provenance) -> RunConfig:
    """Return the configuration with the critic's unset batch sizes and model from the actor."""
    if not config.has_critic:
        return config
    worker = config.worker
    sizes = {key: lookup(worker.actor, key) for key in BATCH_SIZES if not provenance.is_set(f"worker.critic.{key}")}
    model = worker.critic.model
    if model.model_path is None:
        own = [key for key in MODEL if not lookup(config, f"worker.critic.model.{key}")]
        model = model.model_copy(update={key: lookup(worker.actor.model, key) for key in own})
    critic = worker.critic.model_copy(update={**sizes, "model": model})
    return config.model_copy(update={"worker": worker.model_copy(update={"critic": critic})})


def split_words(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Separate the configuration file from the settings. Raises ConfigError for two files."""
    files = [w.removeprefix("config=") for w in words if w.startswith("config=") or _is_file(w)]
    if len(files) > 1:
        raise ConfigError([Problem("config", f"one configuration file at a time, got {' and '.join(files)}")])
    return (Path(files[0]) if files else None), [w for w in words if not (w.startswith("config=") or _is_file(w))]


def _is_file(word: str) -> bool:
    return "=" not in word and not word.startswith("-") and (word.endswith((".yaml", ".yml")) or os.path.isfile(word))


def _merge(layers: Iterable[list[Setting]]) -> tuple[dict[str, Setting], list[Problem]]:
    merged: dict[str, Setting] = {}
    problems: list[Problem] = []
    for layer in layers:
        for setting in layer:
            problem = _key_problem(setting)
            if problem:
                problems.append(problem)
                continue
            if setting.key in schema().open_mappings:  # given as a whole: null empties it
                if setting.value is None:
                    merged = {key: s for key, s in merged.items() if not key.startswith(f"{setting.key}.")}
                if setting.value in (None, {}):
                    continue
            if not (setting.key in schema().sections and setting.value in (None, {})):
                merged[setting.key] = setting
    return merged, problems


def _key_problem(setting: Setting) -> Problem | None:
    key, flat = setting.key, schema()
    above = flat.open_mapping_above(key)
    if setting.added and above is None:
        message = "a leading + adds a key to an open mapping only"
        message += f"; write {key}=… without it" if flat.has(key) else f" ({', '.join(sorted(flat.open_mappings))})"
    elif flat.has(key):
        if not (reference := _reference(setting.value)):
            return None
        message = f"{reference} is not replaced by another key's value here; write the value itself"
    elif key in flat.sections:
        if setting.value in (None, {}):
            return None
        inside = next(name for name in flat.values if name.startswith(f"{key}."))
        message = f"is a section; set a key inside it, such as {inside}"
    elif parent := next((name for name in flat.values if key.startswith(f"{name}.")), None):
        message = f"{parent} is a single value and has no keys inside"
    else:
        near = shared_key(key) or nearest_key(key)
        message = "unknown key" + (f"; did you mean {near}?" if near else "; see examples/config.yaml for all keys")
    return Problem(key, message, setting.raw, setting.origin)


def _reference(value: object) -> str | None:
    references = re.findall(r"\$\{([\w.]+)\}", value) if isinstance(value, str) else []
    return next((f"${{{name}}}" for name in references if schema().has(name)), None)


def _validate(settings: Mapping[str, Setting]) -> tuple[RunConfig | None, list[Problem]]:
    try:
        return RunConfig.model_validate(_nested(settings.values())), []
    except ValidationError as error:
        found: dict[str, Problem] = {}
        for detail in error.errors(include_url=False):
            key = _key_of(detail["loc"])
            setting = settings.get(key)
            raw, origin = (setting.raw, setting.origin) if setting else (str(detail["input"]), "")
            if inside := _place_inside(key, detail["loc"]):
                problem = Problem(key + inside, _inner_message(detail), str(detail["input"]), origin)
                found.setdefault(key + inside, problem)
                continue
            found.setdefault(key, Problem(key, _type_message(key, raw, detail), raw, origin))
        return None, list(found.values())


def _nested(settings: Iterable[Setting]) -> Tree:
    tree: Tree = {}
    for setting in settings:
        *path, last = setting.key.split(".")
        section = tree
        for name in path:
            section = section.setdefault(name, {})
            if not isinstance(section, dict):
                other = setting.key.rpartition(".")[0]
                raise ConfigError([Problem(setting.key, f"{other} has a value of its own, too: give one of the two")])
        as_text = schema().is_text(setting.key) and isinstance(setting.value, bool | int | float | str)
        section[last] = setting.raw if as_text else setting.value
    return tree


def _key_of(location: tuple[int | str, ...]) -> str:
    for end in range(len(location), 0, -1):
        key = ".".join(str(part) for part in location[:end])
        if schema().has(key) or key in schema().sections:
            return key
    return str(location[0])


def _place_inside(key: str, location: tuple[int | str, ...]) -> str:
    if not key.endswith("sources") or len(location) < 3:
        return ""
    index, *rest = location[2:]
    return f"[{index}]" + "".join(f".{part}" for part in rest[:1])


def _inner_message(detail: ErrorDetails) -> str:
    if detail["type"] == "extra_forbidden":
        known, typed = list(SourceConfig.model_fields), str(detail["loc"][-1])
        near = get_close_matches(typed, known, n=1, cutoff=0.5)
        return f"unknown key; did you mean {near[0]}?" if near else f"unknown key; there are {', '.join(known)}"
    if detail["type"] == "missing":
        return "is missing"
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _type_message(key: str, raw: str, detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "literal_error":
        words = choices(schema().values[key].annotation)
        near = get_close_matches(raw.strip("'\"").lower(), words, n=1, cutoff=0.5)
        return f"must be one of {', '.join(words)}" + (f"; did you mean {near[0]}?" if near else "")
    if kind in BOUNDS:
        return f"must be {BOUNDS[kind]} {next(iter(context.values()))}"
    if kind in WANTED:
        return f"must be {WANTED[kind]}" + "".join(f" or {word}" for word in _words_beside(key))
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _words_beside(key: str) -> list[str]:
    field_info = schema().values.get(key)
    if field_info is None:
        return []
    kinds = get_args(field_info.annotation)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in choices(kind)]
    return words + (["null"] if type(None) in kinds else [])
