"""Ray actors that outlive the restarts of a run, so that a restart imports again only what a fault has ended."""

from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from threading import Lock
from typing import Any

from r1_cli.faults.processes import kill_all, title_of
from r1_cli.placement import ActorPlacement

RESET_SECONDS = 10.0  # for a kept actor to end what it does; otherwise another is started


@dataclass(frozen=True, slots=True)
class RunningActor:
    place: ActorPlacement
    handle: Any
    pid: int | None  # None: it has not told yet

    def kill(self) -> None:
        import ray

        ray.kill(self.handle)
        # A stopped process does not obey Ray.
        here = self.pid and self.place.node.id == ray.get_runtime_context().get_node_id()
        if self.pid and here and title_of(self.pid).startswith("ray::"):
            kill_all([self.pid])


class KeptActors:
    """Actors of groups that were closed, until the next start of the run takes them or the run ends."""

    def __init__(self) -> None:
        self._actors: list[RunningActor] = []
        self._turn = Lock()  # engines are started again in threads

    def add(self, actors: Sequence[RunningActor]) -> None:
        with self._turn:
            self._actors += [one for one in actors if one not in self._actors]

    def take(self, places: Sequence[ActorPlacement]) -> list[RunningActor | None]:
        """Return for each place an actor that was there and has left what it did, None without one.

        Those that are dead, or not ready within `RESET_SECONDS`, are killed.
        """
        wanted = {place.identity for place in places}
        with self._turn:
            offered = [one for one in self._actors if one.place.identity in wanted]
            self._actors = [one for one in self._actors if one.place.identity not in wanted]
        resets = {one.handle.reset.remote().future(): one for one in offered}
        wait(resets, RESET_SECONDS)
        usable: dict[Any, RunningActor] = {}
        for reset, one in resets.items():
            if reset.done() and reset.exception() is None and one.place.identity not in usable:
                usable[one.place.identity] = one
            else:
                one.kill()
        return [usable.get(place.identity) for place in places]

    def close(self) -> None:
        with self._turn:
            for one in self._actors:
                one.kill()
            self._actors = []
