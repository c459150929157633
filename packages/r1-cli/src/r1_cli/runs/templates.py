"""Copies of a run's format prompts in its folder: the folder can be moved, and the user's files edited or deleted."""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from r1_cli.runs.history import JsonObject

log = logging.getLogger("r1")

FOLDER, KEY = "format_prompts", "format_prompt"


def copy_templates(run: Path, settings: JsonObject) -> None:
    """Copy the format prompts that printed settings name; warn of one that has changed since the last start."""
    for section in _sections(settings):
        name, copy = section[KEY], _copy(run, section[KEY])
        text = Path(name).read_bytes()
        if copy.is_file() and copy.read_bytes() != text:
            log.warning("the format prompt %s has changed since the last start", name)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(text)


def with_copies(run: Path, settings: JsonObject) -> JsonObject:
    """Return the settings of a run with its copies in place of the format prompts that they name."""
    found: JsonObject = json.loads(json.dumps(settings))
    for section in _sections(found):
        copy = _copy(run, section[KEY])
        section[KEY] = str(copy) if copy.is_file() else section[KEY]
    return found


def override_words(run: Path, settings: JsonObject) -> list[str]:
    """Return the words `KEY=VALUE` that let the configuration of a run read its copies."""
    before, after = settings.get("data", {}), with_copies(run, settings).get("data", {})
    return [f"data.{key}={json.dumps(value)}" for key, value in after.items() if value != before[key]]


def _copy(run: Path, name: str) -> Path:
    return run.absolute() / FOLDER / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}.jinja"


def _sections(settings: JsonObject) -> Iterator[dict[str, Any]]:
    """Yield `data` and its sources, of those that name a format prompt."""
    data = settings.get("data") or {}
    for section in (data, *(data.get("sources") or ()), *(data.get("val_sources") or ())):
        if section.get(KEY):
            yield section
