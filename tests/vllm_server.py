"""A real `vllm serve` of a tiny model in a process of its own, without r1's own way to start one."""

import importlib.metadata
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from patience import eventually

TINY = ["--dtype=float32", "--max-model-len=512", "--kv-cache-memory-bytes=67108864", "--enforce-eager"]


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as reply:
            return int(reply.status) == 200
    except OSError:
        return False


@contextmanager
def serving(words: Sequence[str], folder: Path, *options: str) -> Iterator[str]:
    """The address of a server that the command `words` starts in `folder`, where its log is."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    words = [str(port) if word == "8000" else word for word in words]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # vLLM does not look for its CPU build, which has another name
        named = folder / "named/vllm-0.dist-info"
        named.mkdir(parents=True, exist_ok=True)
        (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0+cpu\n")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(named.parent), os.environ.get("PYTHONPATH")]))
    program, log = Path(sys.executable).with_name(words[0]), folder / f"log-{port}"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [program, *words[1:], *options, *TINY], cwd=folder, env=environment, stdout=output, stderr=output
        ) as process,
    ):
        address = f"http://127.0.0.1:{port}"
        eventually(lambda: healthy(f"{address}/health") or process.poll() is not None, 900)
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        try:
            yield address
        finally:
            process.terminate()
