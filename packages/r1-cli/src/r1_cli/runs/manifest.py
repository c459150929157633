"""The manifest: settings, versions, commit, data, machine and seeds of each start of a run, and its end."""

import logging
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from r1_cli.checkpoint.folders import write_json
from r1_cli.checkpoint.locks import exclusive
from r1_cli.config.problems import MASK, SECRET, hide_url_passwords
from r1_cli.runs.history import JsonObject
from r1_cli.runs.reader import MANIFEST_FILE, RunReader

log = logging.getLogger("r1")

PACKAGES = (
    "r1-core", "r1-rollout", "r1-rewards", "r1-data", "r1-cli", "r1-easyr1", "torch", "torchvision", "transformers",
    "vllm", "ray", "peft", "bitsandbytes", "numpy", "pyarrow", "pillow", "tokenizers", "safetensors", "math-verify",
)  # fmt: skip
# Variables that change what a run computes; none of them is a secret.
VARIABLES = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_ATTENTION_BACKEND", "SLURM_JOB_ID")
SECRETS = re.compile(r"[\w.+-]*(api_?key|secret|password|passwd|credential|token)[\"']?\s*[:=]", re.IGNORECASE)
SECONDS = 10.0  # that git may take


@contextmanager
def record_start(
    folder: Path,
    config: JsonObject,
    rows: Mapping[str, str],
    devices: Sequence[str],
    step: int,
    numerics: Mapping[str, object] | None = None,
    code: Mapping[str, str] | None = None,
    plan: Mapping[str, object] | None = None,
    restart: Mapping[str, object] | None = None,
) -> Iterator[JsonObject]:
    """Add a start of the run to its manifest, and its end when the block ends.

    The block may set `end` in the yielded start if the run is incomplete; else an exception is its end.

    Args: folder: the run's. config: the printed settings, without secrets. rows: a digest of the rows of each source,
    by name. devices: names of the devices. step: the step it resumes from. numerics: what else decides the last bits of
    the numbers: `threads` of the training process, and the automatic `micro_batches` by key. code: a digest of each of
    the user's files that the settings name, by `file.py:name`. plan: `steps` in all, and the number of `rows` of each
    source, by name. restart: of a start by itself after a fault: its cause, and what it has cost.
    """
    start = {
        "began": now(),
        "ended": None,
        "end": "is running, or was killed",
        "from_step": step,
        "command": hide_secrets(sys.argv),
        "process": os.getpid(),
        "config": config,
        "rows": dict(rows),
        "code": dict(code or {}),
        "numerics": dict(numerics or {}),
        "plan": dict(plan or {}),
        **({"restart": dict(restart)} if restart else {}),
        "seeds": {"data": config["data"]["seed"], "rollout": config["worker"]["rollout"]["seed"]},
        **_software(),
        "host": _host(devices),
    }
    write_start(folder, start, new=True)
    start["end"] = "complete"
    try:
        yield start
    except BaseException as error:
        if start["end"] == "complete":
            start["end"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise
    finally:
        start["ended"] = now()
        try:
            write_start(folder, start)
        except OSError as error:
            log.warning("%s does not say how the run ended: %s", folder / MANIFEST_FILE, error)


def write_start(folder: Path, start: JsonObject, *, new: bool = False) -> None:
    """Write a start into the manifest, which shards of `r1 sample` share: another's may have come since."""
    with exclusive(folder):
        starts = RunReader(folder).starts()
        same = [place for place, one in enumerate(starts) if not new and _same_start(one, start)]
        place = same[-1] if same else len(starts)
        write_json(folder / MANIFEST_FILE, {"starts": [*starts[:place], start, *starts[place + 1 :]]})


def _same_start(one: JsonObject, other: JsonObject) -> bool:
    return all(one.get(name) == other[name] for name in ("began", "command", "process"))


def _software() -> JsonObject:
    return {"packages": find_versions(), "python": platform.python_version(), "git": find_commit(Path.cwd())}


def _host(devices: Sequence[str]) -> JsonObject:
    return {
        "name": platform.node(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "devices": list(devices),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def hide_secrets(words: Sequence[str]) -> str:
    """Return the command line without secrets."""
    shown = []
    for word in words:
        key, sign, value = word.partition("=")
        hidden = sign and (SECRET.search(key.rpartition(".")[2]) or SECRETS.search(value))
        shown.append(f"{key}={MASK}" if hidden else hide_url_passwords(word))
    return shlex.join(shown)


def find_versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def find_commit(folder: Path) -> JsonObject | None:
    """Return the commit of the checkout at `folder`, and whether tracked files are modified; None without one."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        return {
            "commit": commit,
            "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no").strip()),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True).stdout


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
