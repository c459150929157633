"""Weights & Biases, online if possible, else offline; it never prompts."""

import logging
import netrc
import os
import socket
import uuid
from typing import Literal
from urllib.parse import urlparse

from r1_cli.runs.history import JsonObject
from r1_cli.runs.track.types import Record, RunInfo

log = logging.getLogger("r1")
REACH_SECONDS = 3.0


class WandbLogger:
    """One wandb run, whose id is stored in the run's folder, so that a resumed run continues its charts."""

    def __init__(self, info: RunInfo) -> None:
        import wandb

        mode = choose_mode(os.environ.get("WANDB_API_KEY") or _saved_key())
        id_file = info.folder / "wandb_run_id"
        if not id_file.is_file():
            id_file.write_text(uuid.uuid4().hex[:8])
        self._wandb = wandb
        self._run = wandb.init(
            project=info.project,
            name=info.experiment,
            config=info.config,
            id=id_file.read_text().strip(),
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(info.folder),
            settings=wandb.Settings(init_timeout=60, silent=True),
        )

    def log(self, step: int, record: Record) -> None:
        self._run.log(record, step=step)

    def log_generations(self, step: int, rows: list[JsonObject]) -> None:
        columns = list(rows[0])
        table = self._wandb.Table(columns=columns, data=[[row[c] for c in columns] for row in rows])
        self._run.log({"val/generations": table}, step=step)

    def close(self) -> None:
        self._run.finish()


def choose_mode(api_key: str | None) -> Literal["online", "offline", "disabled"]:
    """Return wandb's mode: `WANDB_MODE`, else online with a key and a network, else offline."""
    asked = os.environ.get("WANDB_MODE")
    if asked in ("online", "offline", "disabled"):
        return asked  # type: ignore[return-value]
    if not api_key:
        log.warning("wandb has no API key: logging offline (set WANDB_API_KEY, or later `wandb sync` the run)")
        return "offline"
    url = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        port = url.port or (443 if url.scheme == "https" else 80)
        socket.create_connection((url.hostname or "", port), timeout=REACH_SECONDS).close()
    except OSError as error:
        log.warning("wandb cannot be reached (%s): logging offline", error)
        return "offline"
    return "online"


def _saved_key() -> str | None:
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        entry = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return None
    return entry[2] if entry else None


def open_logger(info: RunInfo) -> WandbLogger:
    return WandbLogger(info)
