"""A connection to Ray, and actors, that outlive the restarts of a run."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from r1_cli.cluster.kept_actors import KeptActors

Cluster = TypeVar("Cluster")


class RayConnection(Generic[Cluster]):
    """Opens a connection when it is first needed, and again only if it is broken. Closes it at the end of the block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._cluster: Cluster | None = None
        self.kept: KeptActors | None = None  # actors of the starts before

    def __enter__(self) -> "RayConnection[Cluster]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def end_kept(self) -> None:
        """End the kept actors: the next start gets new ones."""
        if self.kept is not None:
            self.kept.close()

    def get(self, open_cluster: Callable[[], AbstractContextManager[Cluster]]) -> Cluster:
        if self._cluster is not None and not _is_alive():
            self._stack.close()
            self._cluster = None
        if self._cluster is None:
            self._cluster = self._stack.enter_context(open_cluster())  # sets what Ray reads when it is imported
            from r1_cli.cluster.kept_actors import KeptActors

            self.kept = KeptActors()
            self._stack.callback(self.kept.close)
        return self._cluster


def _is_alive() -> bool:
    """Whether Ray answers, and this process's node is one of its nodes."""
    import ray

    try:
        own = ray.get_runtime_context().get_node_id()
        return any(node["Alive"] and node["NodeID"] == own for node in ray.nodes())
    except Exception:  # Ray raises several kinds where its processes are gone
        return False
