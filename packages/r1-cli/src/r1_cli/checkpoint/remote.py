"""Copies of a run's checkpoints at a URL that fsspec knows: s3://, gs://, hf://, or a folder of another disk."""

import logging
import shutil
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.background import Background
from r1_cli.checkpoint.damage import STATE_FILE, find_damage
from r1_cli.checkpoint.folders import STEP_FOLDER, CheckpointError, CheckpointStore

TRIES, PAUSE = 3, 5.0  # of an upload; seconds before the second try, then twice that
WAITING = 600.0  # seconds that the end of a run waits for an upload
EXTRAS = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs"}

log = logging.getLogger("r1")


def open_url(url: str) -> tuple[Any, str]:
    """Return the file system and the path of a URL. Raises CheckpointError if nothing installed knows such URLs."""
    try:
        from fsspec.core import url_to_fs

        fs, path = url_to_fs(url.rstrip("/"))
    except (ImportError, ValueError) as error:
        extra = EXTRAS.get(url.partition("://")[0])
        advice = f" (pip install {extra})" if extra else ""
        raise CheckpointError(f"{url} cannot be opened: {error}{advice}") from error
    return fs, path


class RemoteFolder:
    """A folder at a URL with the checkpoints of one run.

    `trainer.json` of a checkpoint is uploaded last and removed first, so that a folder that has it is complete.
    """

    def __init__(self, url: str) -> None:
        """Raises CheckpointError if nothing installed knows such URLs."""
        self.url, (self._fs, self._root) = url.rstrip("/"), open_url(url)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints. Raises OSError."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False))
        found = [int(match[1]) for name in names if (match := STEP_FOLDER.fullmatch(name))]
        return sorted(step for step in found if self._fs.exists(f"{self._path(step)}/{STATE_FILE}"))

    def upload(self, checkpoint: Path, logs: list[Path], limit: int | None) -> None:
        """Upload a checkpoint and the run's logs; remove all but the newest `limit` checkpoints. Raises OSError."""
        target = f"{self._root}/{checkpoint.name}"
        self._remove(target)
        files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path != checkpoint / STATE_FILE)
        for path in (*files, checkpoint / STATE_FILE):
            self._put(path, f"{target}/{path.relative_to(checkpoint).as_posix()}")
        for path in logs:
            self._put(path, f"{self._root}/{path.name}")
        for step in self.steps()[: -limit if limit else 0]:
            self._remove(self._path(step))

    def download(self, step: int, folder: Path) -> Path:
        """Download a checkpoint, and logs that `folder` lacks, into `folder`; return the checkpoint.

        Raises:
            CheckpointError: it is damaged.
            OSError: it cannot be read, or the disk is full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        draft, final = folder / f".draft_download_{step}", folder / f"global_step_{step}"
        shutil.rmtree(draft, ignore_errors=True)
        for path in self._fs.find(self._path(step)):
            place = draft / path.rpartition(f"global_step_{step}/")[2]
            place.parent.mkdir(parents=True, exist_ok=True)
            self._fs.get_file(path, str(place))
        if (damage := find_damage(draft, contents=True)) is not None:
            shutil.rmtree(draft)
            raise CheckpointError(f"{self.url}/{final.name} is damaged: {damage}")
        for path in self._fs.ls(self._root, detail=False):
            name = path.rpartition("/")[2]
            if name.endswith((".json", ".jsonl")) and not (folder / name).exists():
                self._fs.get_file(path, str(folder / name))
        return draft.rename(final)

    def fetch(self, name: str, folder: Path) -> Path:
        """Download the checkpoint of this name, unless `folder` has it; return it. Raises CheckpointError."""
        match = STEP_FOLDER.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{self.url}/{name} is not the URL of a checkpoint, which ends in global_step_N")
        if (folder / name).is_dir():
            return folder / name
        try:
            if int(match[1]) not in (steps := self.steps()):
                raise CheckpointError(f"{self.url} has no whole checkpoint {name}; its steps: {steps}")
            return self.download(int(match[1]), folder)
        except CheckpointError:
            raise
        except Exception as error:  # of any storage library
            raise CheckpointError(f"{self.url} cannot be read: {type(error).__name__}: {error}") from error

    def _path(self, step: int) -> str:
        return f"{self._root}/global_step_{step}"

    def _put(self, path: Path, target: str) -> None:
        self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._fs.put_file(str(path), target)

    def _remove(self, folder: str) -> None:
        if self._fs.exists(f"{folder}/{STATE_FILE}"):
            self._fs.rm(f"{folder}/{STATE_FILE}")
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)


class Uploader:
    """Uploads published checkpoints in a thread, the newest first; failures are logged and end nothing."""

    def __init__(self, store: CheckpointStore, url: str) -> None:
        """Raises CheckpointError if nothing installed knows such URLs."""
        self._store, self._remote = store, RemoteFolder(url)
        self._thread = Background("r1-uploading", room=2)
        self._last: Future[Any] | None = None
        self._failed = False

    def upload(self) -> None:
        """Begin to upload the newest checkpoint, unless two wait already."""
        self._last = self._thread.offer(self._upload) or self._last

    def wait(self) -> None:
        """Wait for the latest upload. Raises TimeoutError after `WAITING` seconds."""
        if self._last is not None:
            self._last.result(WAITING)

    def close(self) -> None:
        """Wait for the uploads, for at most `WAITING` seconds."""
        try:
            self.wait()
            self._thread.close()
        except TimeoutError:
            log.warning("the newest checkpoint is not at %s yet: it took longer than %g s", self._remote.url, WAITING)

    def _upload(self) -> None:
        for number in range(TRIES):
            newest = self._store.latest()
            try:
                if newest is not None and int(newest.name.rpartition("_")[2]) not in self._remote.steps():
                    logs = [path for path in newest.parent.iterdir() if path.suffix in (".json", ".jsonl")]
                    self._remote.upload(newest, logs, self._store.limit)
                if self._failed:
                    log.warning("checkpoints are uploaded to %s again", self._remote.url)
                self._failed = False
                return
            except Exception as error:  # of any storage library
                failure = error
                if number < TRIES - 1:
                    time.sleep(PAUSE * 2**number)
        if not self._failed:
            message = "%s could not be uploaded to %s: %s: %s; the run goes on, and tries again with the next"
            log.warning(message, newest, self._remote.url, type(failure).__name__, failure)
        self._failed = True


def fetch_newest(url: str, folder: Path) -> Path | None:
    """Download the newest whole checkpoint from `url` into `folder`; None if there is none.

    Raises CheckpointError if it cannot be read.
    """
    remote = RemoteFolder(url)
    try:
        for step in reversed(remote.steps()):
            try:
                return remote.download(step, folder)
            except CheckpointError as error:
                log.warning("%s; the one before is taken", error)
    except Exception as error:  # of any storage library
        raise CheckpointError(f"{url} cannot be read: {type(error).__name__}: {error}") from error
    return None
