"""Download models from URLs that fsspec knows: s3://, gs://, hf://."""

import fcntl
import hashlib
import json
import logging
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from r1_cli.checkpoint.folders import CheckpointError
from r1_cli.checkpoint.remote import open_url

UNREAD = ["*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5"]  # beside the same as safetensors
STATES = ["optimizer*.safetensors"]  # of a checkpoint of r1, which no model reads

log = logging.getLogger("r1")


def download_model(url: str) -> Path:
    """Return the folder with a model's files from `url`, or from the `actor` in it: HF_HOME/r1-urls/….

    Files that have changed at the URL are downloaded again, into another folder. If the URL cannot be read, the folder
    of the latest download is returned.

    Raises:
        OSError: it cannot be read, or has no `config.json`.
    """
    from huggingface_hub.constants import HF_HOME

    home = Path(HF_HOME, "r1-urls", hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16])
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a machine wait for the first
        try:
            return _download(url, home)
        except Exception as error:  # of any storage library
            before = sorted(home.glob("files-*"), key=lambda folder: folder.stat().st_mtime)
            if not before or isinstance(error, FileNotFoundError):
                raise OSError(f"cannot be downloaded ({type(error).__name__}: {error})") from error
            log.warning("%s cannot be read now (%s): the files of the last download are used", url, error)
            return before[-1]


def _download(url: str, home: Path) -> Path:
    files, fs = _list_files(url)
    listed = json.dumps([[name, fs.ukey(path)] for name, path in sorted(files.items())])
    folder, draft = home / f"files-{hashlib.sha256(listed.encode()).hexdigest()[:16]}", home / ".draft"
    if folder.is_dir():
        return folder
    shutil.rmtree(draft, ignore_errors=True)
    log.info("downloading %d files from %s", len(files), url)
    for name, path in files.items():
        (draft / name).parent.mkdir(parents=True, exist_ok=True)
        fs.get_file(path, str(draft / name))
        if (size := (draft / name).stat().st_size) != fs.size(path):
            raise OSError(f"{name} has {fs.size(path)} bytes there, and {size} arrived")
    return draft.rename(folder)


def _list_files(url: str) -> tuple[dict[str, str], Any]:
    """Return the paths of a model's files by name, and their file system."""
    try:
        fs, root = open_url(url)
    except CheckpointError as error:
        raise FileNotFoundError(str(error)) from error
    fs.invalidate_cache()
    if not fs.exists(f"{root}/config.json") and fs.exists(f"{root}/actor/config.json"):
        root = f"{root}/actor"
    if not fs.exists(f"{root}/config.json"):
        raise FileNotFoundError(f"{url} has no config.json")
    files = {path.rpartition(f"{root.strip('/')}/")[2]: path for path in fs.find(root)}
    whole = any(fnmatch(name, "*.safetensors") for name in files)
    left_out = [*STATES, *(UNREAD if whole else [])]
    return {name: path for name, path in files.items() if not any(fnmatch(name, one) for one in left_out)}, fs
