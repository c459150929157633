"""One node's part of the copies in memory: the files of its own ranks, and those of the node before it."""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import disk_usage
from typing import Any

from r1_cli.checkpoint.damage import STATE_FILE, WHOLE, find_damage
from r1_cli.checkpoint.folders import CheckpointStore, Draft, read_state
from r1_cli.checkpoint.memory import KEPT, RAM_DISK, all_copies, claim_folder, make_folder, remove_copies
from r1_cli.hardware import free_memory
from r1_core.disk import force_to_disk

OWN, NEIGHBOUR = "own", "neighbour"  # stores in a node's folder
INCOMING = "incoming"  # beside them: the files of the ranks that are being written
CHUNK = 64 * 2**20  # bytes of a file that are sent at once
READERS = 4  # files that are sent at once

Source = Callable[..., Any]  # calls a method of the node before: `source(method, *arguments)`


@dataclass(frozen=True, slots=True)
class NodePart:
    """What a node holds of a copy.

    Example: `NodePart(7, Path("/dev/shm/r1-copies-6f0c-x/own/global_step_7"), {…}, 1785400000.0)`.
    """

    step: int
    folder: Path
    state: dict[str, Any]  # the trainer's, with the files of this part and of the whole copy
    written: float  # by `time.time`

    @property
    def files(self) -> set[str]:
        return set(self.state["files"])

    @property
    def whole(self) -> set[str]:
        return set(self.state.get(WHOLE, self.state["files"]))  # without, one machine has all of it

    @property
    def is_own(self) -> bool:
        return self.folder.parent.name != NEIGHBOUR


class NodeCopies:
    """What a process of each node does for the run's copies, as `cluster.copies.ClusterCopies` calls it."""

    def __init__(self, run: Path, node: str, number: int, source: Source | None) -> None:
        """`number` is this node's among those that hold copies, `source` the node before it; None: it is alone."""
        self._run, self._node, self._number, self._source = run, node, number, source
        self._drafts: list[tuple[CheckpointStore, Draft]] = []

    # --- copies of an earlier start ----------------------------------------------------------------------------------

    def find(self) -> list[NodePart]:
        """Return the parts of copies that are here, without reading their tensors."""
        found = []
        for folder in all_copies(self._run):
            for store in map(CheckpointStore, (folder, folder / OWN, folder / NEIGHBOUR)):
                for step in store.steps():
                    with suppress(OSError, ValueError):
                        path = store.path(step)
                        found.append(NodePart(step, path, read_state(path), (path / STATE_FILE).stat().st_mtime))
        return found

    def verify(self, step: int) -> list[NodePart]:
        """Return the parts of a step whose checksums are right."""
        return [part for part in self.find() if part.step == step and find_damage(part.folder, contents=True) is None]

    def write_out(self, folder: Path, plan: Sequence[Mapping[str, Path]]) -> None:
        """Write this node's entry of `plan`, sources by the file's name, to a folder on the shared disk."""
        for name, source in plan[self._number].items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            force_to_disk(target)

    def remove(self) -> None:
        """Remove the run's copies from this machine."""
        remove_copies(self._run)

    # --- copies of this start ----------------------------------------------------------------------------------------

    def make(self) -> Path:
        """Make this node's folder; `claim` it once the run names it."""
        self._folder = make_folder(f"{self._node[:12]}-")
        for kind in (OWN, NEIGHBOUR):
            (self._folder / kind).mkdir()
        self._own, self._neighbour = (CheckpointStore(self._folder / kind, KEPT) for kind in (OWN, NEIGHBOUR))
        return self._folder

    def claim(self) -> None:
        claim_folder(self._folder, self._run)

    def begin(self) -> None:
        """Make an empty folder for the files that this node's ranks are about to write."""
        self._drafts = []
        shutil.rmtree(self._folder / INCOMING, ignore_errors=True)
        (self._folder / INCOMING).mkdir()

    def add(self, files: Mapping[str, bytes]) -> None:
        """Add files of the driver to those of the ranks."""
        for name, content in files.items():
            path = self._folder / INCOMING / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def incoming(self) -> list[str]:
        return list(list_files(self._folder / INCOMING))

    def seal(self, step: int, state: dict[str, Any]) -> None:
        """Complete this node's own part. Raises CheckpointError."""
        incoming = self._folder / INCOMING

        def move(folder: Path) -> None:
            incoming.rename(folder)  # which is empty

        self._drafts.append((self._own, self._own.write(step, move, state)))

    def pull(self, step: int, state: dict[str, Any]) -> None:
        """Copy the own part of the node before. Raises CheckpointError, or ClusterError if that node is gone."""
        if self._source is not None:
            draft = self._neighbour.write(step, partial(copy_part, self._source), state)
            self._drafts.append((self._neighbour, draft))

    def sealed_files(self) -> dict[str, int]:
        """Return the sizes of the files of the own part, by name."""
        files = list_files(self._drafts[0][1].folder)
        return {name: size for name, size in files.items() if name != STATE_FILE}

    def read(self, name: str, offset: int) -> bytes:
        with (self._drafts[0][1].folder / name).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK)

    def publish(self) -> int:
        """Publish both parts and delete older ones; return as `free`. Raises CheckpointError."""
        for store, draft in self._drafts:
            store.publish(draft)
        return self.free()

    def free(self) -> int:
        """Return the bytes that copies may still take on this node."""
        return min(free_memory(), disk_usage(RAM_DISK).free) if RAM_DISK.is_dir() else 0


def list_files(folder: Path) -> dict[str, int]:
    """Return the sizes of a folder's files by their paths in it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def copy_part(source: Source, folder: Path) -> None:
    """Copy the files of another node's own part into `folder`, `READERS` at once."""
    sizes: dict[str, int] = source("sealed_files")
    with ThreadPoolExecutor(READERS) as threads:
        for copied in [threads.submit(_copy_file, source, name, size, folder / name) for name, size in sizes.items()]:
            copied.result()


def _copy_file(source: Source, name: str, size: int, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for offset in range(0, size, CHUNK):
            file.write(source("read", name, offset))
