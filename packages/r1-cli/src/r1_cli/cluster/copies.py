"""Copies of a run's state in the memory of several nodes: each file is on two, so one can be lost."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from r1_cli.checkpoint.damage import STATE_FILE, WHOLE
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore, Draft
from r1_cli.checkpoint.memory import Copies, forget_copies, name_folders
from r1_cli.checkpoint.node_copies import INCOMING, OWN, NodePart, list_files
from r1_cli.cluster.worker_group import ClusterError, WorkerGroup

if TYPE_CHECKING:
    from r1_cli.cluster.actors import ActorGroup

OF_FILES = ("files", "checksums", "checksum", WHOLE)  # in the trainer's state: those of a part


class ClusterCopies(Copies):
    """The copies of a run on its nodes: each holds its ranks' files and, of the node before it, a copy of them.

    A copy is complete where the union of the parts is. It is written to the run's folder before a run resumes from it:
    ranks of other nodes read it there.
    """

    def __init__(self, run: Path, hosts: "ActorGroup", ranks: WorkerGroup, host_of_rank: Sequence[int]) -> None:
        """`hosts` hold a `NodeCopies` each; `host_of_rank` says on whose node each rank is."""
        self._run, self._hosts, self._ranks, self._host_of_rank = run, hosts, ranks, host_of_rank
        self._folders: list[Path] = []
        self._latest: Path | None = None
        self._free: list[int] = hosts.call_all("free")

    # --- copies of an earlier start ----------------------------------------------------------------------------------

    def restore(self, store: CheckpointStore) -> int | None:
        """Write the newest whole copy to `store` if it is newer than the checkpoints there; return its step.

        Raises:
            CheckpointError: it cannot be written; the copies stay.
            ClusterError: a node is gone.
        """
        newest = max(store.steps(), default=0)
        found = [part for parts in self._hosts.call_all("find") for part in parts if part.step > newest]
        for step in sorted({part.step for part in found}, reverse=True):
            if not is_whole([part for part in found if part.step == step]):
                continue
            parts: list[list[NodePart]] = self._hosts.call_all("verify", step)
            verified = [part for own in parts for part in own]
            if is_whole(verified):
                self._write_out(store, step, verified[0], assign_files(parts))
                return step
        return None

    def _write_out(self, store: CheckpointStore, step: int, part: NodePart, plan: list[dict[str, Path]]) -> None:
        state = {name: value for name, value in part.state.items() if name not in OF_FILES}

        def save(folder: Path) -> None:
            self._hosts.call("write_out", folder.resolve(), plan)

        draft = store.write(step, save, state)
        os.utime(draft.folder / STATE_FILE, (part.written, part.written))  # work up to then is not lost
        store.publish(draft)

    # --- copies of this start ----------------------------------------------------------------------------------------

    def open(self) -> None:
        with _as_checkpoint_errors():
            self._hosts.call("remove")
            self._folders = self._hosts.call_all("make")
            name_folders(self._run, self._folders)
            self._hosts.call("claim")
            self._ranks.call("set_copies_folder", [self._folders[host] / INCOMING for host in self._host_of_rank])

    def write(self, step: int, save: Callable[[Path], None], state: dict[str, Any]) -> Draft:
        with _as_checkpoint_errors():
            self._hosts.call("begin")
        with TemporaryDirectory(prefix="r1-driver-") as own:
            save(Path(own))  # which raises as ranks do; their end is not that of the copies
            texts = {name: (Path(own) / name).read_bytes() for name in list_files(Path(own))}
        with _as_checkpoint_errors():
            self._hosts.call_first("add", texts)
            part = {**state, WHOLE: sorted({name for names in self._hosts.call_all("incoming") for name in names})}
            self._hosts.call("seal", step, part)
            self._hosts.call("pull", step, part)
        return Draft(step, self._folders[0] / OWN)

    def publish(self, draft: Draft) -> Path:
        with _as_checkpoint_errors():
            self._free = self._hosts.call_all("publish")
        self._latest = CheckpointStore(draft.folder).path(draft.step)
        return self._latest

    def latest(self) -> Path | None:
        return self._latest

    def free_memory(self) -> int:
        return min(self._free)

    def free_of_hosts(self) -> list[int]:
        return self._free

    def folder_on_ranks(self, folder: Path) -> Path:
        return Path(folder.name)  # in `Rank.set_copies_folder`'s

    def remove(self) -> None:
        self._latest = None
        try:
            with _as_checkpoint_errors():
                self._hosts.call("remove")
        finally:
            forget_copies(self._run)  # the next run on a node removes what is left there


def is_whole(parts: Sequence[NodePart]) -> bool:
    """Whether parts of a step, which some nodes hold, are all that a checkpoint consists of."""
    return bool(parts) and parts[0].whole <= {name for part in parts for name in part.files}


def assign_files(parts: Sequence[Sequence[NodePart]]) -> list[dict[str, Path]]:
    """Return which files each node is to write, sources by name: its ranks' own, then those of nodes that are gone."""
    plan: list[dict[str, Path]] = [{} for _ in parts]
    assigned: set[str] = set()
    for own in (True, False):
        for number, held in enumerate(parts):
            for part in (one for one in held if one.is_own == own):
                new = part.files - assigned
                plan[number].update({name: part.folder / name for name in sorted(new)})
                assigned |= new
    return plan


@contextmanager
def _as_checkpoint_errors() -> Iterator[None]:
    try:
        yield
    except (OSError, ClusterError) as error:
        raise CheckpointError(str(error)) from error
