"""Resume a run: load its checkpoint, reuse its micro-batch sizes, warn of changed settings and rows."""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.damage import STATE_FILE
from r1_cli.checkpoint.folders import CheckpointError, read_state
from r1_cli.config import RunConfig, printable
from r1_cli.config.section import flatten
from r1_cli.train.groups.stream_position import load_stream
from r1_cli.train.types import Dataset, Policy, Position, ValueModel
from r1_data.dataset import PromptDataset

log = logging.getLogger("r1")

OWN_FILE = re.compile(r"(.+\.py)(:\w+)?")  # of the user, with a function or class in it
LEFT_OUT, DIGESTS = "left_out_rows.txt", "rows.json"


def load_start(
    learner: Policy, critic: ValueModel | None, prompts: Dataset, start: Path | None, begin: Position
) -> Position:
    """Load the checkpoint, if any; return the position to resume from. Raises CheckpointError if it does not fit."""
    if start is None:
        return begin
    try:
        state = read_state(start)
        at, model_only = begin.resume(state), bool(state["model_only"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"{type(error).__name__}: {error}"
        raise CheckpointError(
            f"{start / STATE_FILE} holds no position of a run ({told}); name another checkpoint"
        ) from error
    if model_only:
        log.warning("%s was saved without the optimizer (save_model_only): the moments start at zero", start)
    try:
        if critic is not None:
            learner.offload()
            load_critic(critic, start, model_only=model_only)
        learner.load(start / "actor", model_only=model_only)
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointError(f"{start} cannot be resumed from: {error}") from error
    log.info("resuming from %s", start)
    return replace(at, stream=load_stream(at.stream, start, prompts.__getitem__))


def load_critic(critic: ValueModel, start: Path, *, model_only: bool) -> None:
    folder = start / "critic"
    if folder.is_dir():
        critic.load(folder, model_only=model_only)
    else:
        log.warning("%s has no critic: it starts from worker.critic.model.model_path", start)
    critic.offload()


def find_previous_sizes(
    starts: Sequence[Mapping[str, Any]], config: RunConfig, devices: Sequence[str]
) -> dict[str, int]:
    """Return the micro-batch sizes that the folder's last start chose, by key.

    With them a run killed before its first checkpoint repeats bit for bit. {} if that start had other rows, models or
    devices: the sizes may be slow now, or not fit into memory.
    """
    if not starts or starts[-1]["host"]["devices"] != devices:
        return {}
    sizes: dict[str, int] = starts[-1].get("numerics", {}).get("micro_batches", {})
    before, now = (dict(flatten(json.loads(json.dumps(one)))) for one in (starts[-1]["config"], printable(config)))
    differing = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    differing -= {*sizes, "data.cache_dir"}  # where copies are kept changes no size
    return {} if any(key.startswith(("data.", "worker.")) for key in differing) else dict(sizes)


def report_changes(before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = dict(flatten(before)), dict(flatten(now))
    for key in new:
        if key in old and old[key] != new[key]:
            log.warning("setting changed since the last start: %s=%s, was %s", key, new[key], old[key])


def digest_code(settings: object) -> dict[str, str]:
    """Return a digest of every file of the user that printed settings name, by the text that names it."""
    found = {}
    for text in _texts(settings):
        named = OWN_FILE.fullmatch(text)
        if named and Path(named[1]).is_file():
            found[text] = hashlib.sha256(Path(named[1]).read_bytes()).hexdigest()[:32]
    return found


def _texts(settings: object) -> Iterator[str]:
    if isinstance(settings, str):
        yield settings
    elif isinstance(settings, list | dict):
        for one in settings.values() if isinstance(settings, dict) else settings:
            yield from _texts(one)


def report_code(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name, digest in now.items():
        if before.get(name, digest) != digest:
            log.warning("the code of %s has changed since the last start", name)


def record_rows(folder: Path, named: Sequence[tuple[str, PromptDataset]], *, resumed: bool) -> None:
    """Write every omitted row with the reason, and warn of sources that changed since the run started."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name}: {reason}\n" for name, rows in named for reason in rows.left_out()]
    if lines:
        (folder / LEFT_OUT).write_text("".join(lines), encoding="utf-8")
        count = "1 row is" if len(lines) == 1 else f"{len(lines):,} rows are"
        log.warning("%s left out, with the reason in %s", count, folder / LEFT_OUT)
    path, digests = folder / DIGESTS, {name: rows.digest for name, rows in named}
    if resumed and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        for name, digest in digests.items():
            if before.get(name, digest) != digest:
                log.warning("the rows of %s have changed since the run started", name)
    path.write_text(json.dumps(digests, indent=1), encoding="utf-8")
