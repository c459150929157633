"""Where a model's files come from: a folder, the Hugging Face hub, or ModelScope with USE_MODELSCOPE_HUB=1.

The hub itself heeds HF_ENDPOINT, a mirror's address. Every process that reads files asks here, on whatever machine.
"""

import os
from pathlib import Path

UNREAD = [
    "*.bin",
    "*.pth",
    "*.pt",
    "*.gguf",
    "*.onnx",
    "*.msgpack",
    "*.h5",
]  # beside the same as safetensors


def from_modelscope() -> bool:
    """Whether names are ModelScope's, as EasyR1's users ask for it."""
    return os.environ.get("USE_MODELSCOPE_HUB", "").lower() in ("1", "true", "y", "yes")


def find_model(name: str) -> str:
    """Return what transformers and engines can open: `name` itself, or the folder where ModelScope's files of it are.

    Raises:
        OSError: modelscope is not installed, or does not give the files.
    """
    if not name or not from_modelscope() or Path(name).is_dir():
        return name
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise OSError("USE_MODELSCOPE_HUB is set, but modelscope is not installed: pip install modelscope") from error
    try:
        return str(snapshot_download(name, ignore_patterns=UNREAD))
    except Exception as error:  # of its own kinds, by version
        raise OSError(f"ModelScope does not give {name}: {error}") from error
