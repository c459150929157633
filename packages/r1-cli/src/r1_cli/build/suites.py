"""Make suites the validation sources of a configuration: find, check and write their rows."""

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from r1_cli.config.data import SourceConfig
from r1_cli.config.load import load_config
from r1_cli.config.problems import ConfigError
from r1_cli.config.root import RunConfig
from r1_cli.config.rules import find_problems
from r1_cli.config.section import Tree, lookup, with_value
from r1_cli.config.suites import Suite, SuiteRows, SuiteSample, parse_name, source_name, suite_error
from r1_data.benchmark_rows import IMAGES, TRUTH, check_rows, write_rows
from r1_data.sources import read_rows
from r1_data.tables.arrow import download_files
from r1_data.tables.files import KINDS, PACKED
from r1_data.types import DataError

OVERRIDE = "worker.rollout.val_override_config"
_LONGEST_PROMPT = 8192  # tokens


def load_with_suites(
    words: Sequence[str], names: Sequence[str], prompt: str | None, data_root: Path | None
) -> RunConfig:
    """Read a configuration, as `load_config`, whose validation rows are those of suites. Raises as `apply_suites`."""
    config, provenance = load_config(words, command="chat")
    config = apply_suites(config, names, prompt, data_root)
    if problems := find_problems(config, provenance, "eval"):
        raise ConfigError(problems)
    return config


def apply_suites(config: RunConfig, names: Sequence[str], prompt: str | None, data_root: Path | None) -> RunConfig:
    """Return a configuration whose validation sources are these suites, each named `SUITE[:SUBSET]/PROMPT`.

    Rows are read from the hub, or `DIR/SUITE.*` of `data_root`, checked and written to `data.cache_dir`. What the
    configuration sets itself of `data.max_response_length`, `data.max_prompt_length` and
    `worker.rollout.val_override_config` stays. No row is left out: an overlong prompt and unreadable media are errors.

    Raises:
        ConfigError: as `load_suite`; the same rows and prompt twice; rows that are missing or other ones.
    """
    named = [parse_name(word, prompt) for word in names]
    sources: list[SourceConfig] = []
    for word, (name, suite, subset, chosen) in zip(names, named, strict=True):
        source = _source(word, name, suite, subset, chosen, config, data_root)
        if any(source.name == other.name for other in sources):
            raise suite_error(word, f"names {source.name} a second time; evaluate it by another command")
        sources.append(source)
    settings: Tree = {
        "data.val_sources": sources,
        "data.val_files": None,
        "data.filter_overlong_prompts": False,
        "data.bad_rows": "refuse",
    }
    lengths = {
        "max_response_length": max(suite.sample.max_tokens for _, suite, *_ in named),
        "max_prompt_length": _LONGEST_PROMPT,
    }
    settings |= {f"data.{key}": size for key, size in lengths.items() if key not in config.data.model_fields_set}
    for key, value in settings.items():
        config = with_value(config, key, value)
    return config


def _own_sampling(config: RunConfig, sample: SuiteSample) -> Tree:
    """Return how a suite is sampled, without what the configuration sets for all."""
    chosen = lookup(config, OVERRIDE).model_fields_set
    if "max_response_length" in config.data.model_fields_set:
        chosen |= {"max_tokens"}
    return {key: lookup(sample, key) for key in ("n", "temperature", "top_p", "max_tokens") if key not in chosen}


def _source(
    word: str, name: str, suite: Suite, subset: str | None, prompt: str, config: RunConfig, data_root: Path | None
) -> SourceConfig:
    chosen = suite.prompts[prompt]
    home = Path(config.data.cache_dir or tempfile.gettempdir()).expanduser() / "suites" / name
    try:
        rows, digest = _open_rows(word, name, suite, data_root)
        what = json.dumps([digest, suite.model_dump(include={"question", "answer", "choices", "media"}), subset])
        folder = home / hashlib.blake2b(what.encode(), digest_size=8).hexdigest()
        path = folder / f"{name}.jsonl"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"{name}.{os.getpid()}"
            write_rows(rows, suite.row_form(subset), part)
            part.replace(path)
    except DataError as error:
        raise suite_error(word, str(error)) from error
    template = folder / f"{prompt}-{hashlib.blake2b(chosen.text.encode(), digest_size=4).hexdigest()}.jinja"
    template.write_text(chosen.text, encoding="utf-8")
    return SourceConfig(
        files=str(path),
        name=source_name(word, prompt),
        groups=suite.groups,
        **_own_sampling(config, suite.sample),
        prompt_key=suite.question,
        answer_key=TRUTH,
        image_key=IMAGES,
        image_dir=str(folder if (folder / "pictures").is_dir() or data_root is None else data_root),
        format_prompt=str(template),
        system_prompt=chosen.system,
        reward_function=suite.grader,
        reward_function_kwargs=suite.grader_options,
    )


def _open_rows(word: str, name: str, suite: Suite, data_root: Path | None) -> tuple[Any, str]:
    rows = suite.rows
    try:
        specs = _hub_specs(rows) if data_root is None else _local_specs(word, name, data_root, rows)
        opened = read_rows(specs)
        count, digest = check_rows(opened, suite.row_form())
    except DataError as error:
        raise suite_error(word, f"{error}{_remedy(name, rows, data_root, str(error))}") from error
    where = " and ".join(specs)
    if rows.count not in (None, count):
        raise suite_error(word, f"{where} holds {count} rows, the suite has {rows.count}: get the published rows")
    if rows.digest not in (None, digest):
        want = f"the suite's have {rows.digest}; get the published rows, or name a file of your own as a suite"
        raise suite_error(word, f"the rows of {where} are other ones: their digest is {digest}, {want}")
    return opened, digest


def _hub_specs(rows: SuiteRows) -> list[str]:
    """Return what to open, after downloading files that are named. Raises DataError."""
    if rows.files:
        return download_files(rows.hub, rows.files, rows.revision)
    pin = f"#{rows.revision}" if rows.revision else ""
    return [f"{rows.hub}:{name}{pin}@{rows.split}" for name in rows.configs] or [f"{rows.hub}{pin}@{rows.split}"]


def _local_specs(word: str, name: str, data_root: Path, rows: SuiteRows) -> list[str]:
    """Return the copy `DIR/NAME.*`, or what the suite reads of the folder `DIR/NAME`, laid out as the hub's."""
    folder = data_root / name
    if copy := _file_of(folder):
        return [str(copy)]
    if not folder.is_dir():
        kinds = ", ".join(KINDS)
        raise suite_error(word, f"there is no {folder}.jsonl (or {kinds}, or a folder): put its rows there")
    if rows.files:
        specs = {one: folder / one for one in rows.files}
        found = {one: str(path) for one, path in specs.items() if path.is_file()}
    else:
        places = {one: (folder / one, folder / "data" / one) for one in rows.configs}
        found = {
            one: next((f"{path}@{rows.split}" for path in paths if path.is_dir()), str(_file_of(paths[0]) or ""))
            for one, paths in places.items()
        }
        flat = len(rows.configs) < 2 and not any(path.is_dir() for path in folder.iterdir())
        if not rows.configs or (flat and not all(found.values())):
            return [f"{folder}@{rows.split}"]
    if missing := [one for one in rows.files or rows.configs if not found.get(one)]:
        raise suite_error(word, f"there is no {folder / missing[0]}: the suite reads this part of {rows.hub} only")
    return list(found.values())


def _file_of(path: Path) -> Path | None:
    endings = [*KINDS, *(f"{kind}{packed}" for kind in KINDS for packed in PACKED)]
    return next((one for one in (path.with_name(path.name + ending) for ending in endings) if one.is_file()), None)


def _remedy(name: str, rows: SuiteRows, data_root: Path | None, message: str) -> str:
    if data_root is not None:
        return f"; the suite reads the columns {', '.join(rows.columns)}" if "no column" in message else ""
    if rows.gated:
        return f"; {rows.hub} is gated: accept its terms on the hub and set HF_TOKEN, or use --data-root"
    fetch = f"hf download {rows.hub} --repo-type dataset --local-dir DIR/{name}"
    return f"; where the hub can be reached, run `{fetch}`, and then use --data-root DIR"
