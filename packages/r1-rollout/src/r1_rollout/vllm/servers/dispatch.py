"""One call's requests: each group to the server that owes least, moved elsewhere after a fault, delivered once."""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from queue import SimpleQueue

from r1_rollout.types import Completion, PromptLike, SamplingParams
from r1_rollout.vllm.client import Call, RequestRefused, ServerFault
from r1_rollout.vllm.servers.pooled_server import PooledServer
from r1_rollout.vllm.servers.supervisor import Supervisor

Ask = Callable[[PooledServer, PromptLike, Call, Callable[[int], None]], list[Completion]]

FinishedGroups = Generator[tuple[int, list[Completion]], None, None]
Outcome = tuple[int, list[Completion]] | BaseException
ENDED = "this generate() call was ended: by a later one, or by the end of its active block"


class Dispatch:
    """The groups of one `generate` call.

    A group is at any time in one place only: waiting, with one server, or delivered. What a server has sent of a group
    before a fault is thrown away with its request, so nothing is lost and nothing arrives twice.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        prompts: Sequence[PromptLike],
        params: SamplingParams,
        ask_group: Ask,
        *,
        max_sequences: int,
        max_attempts: int,
    ) -> None:
        self._supervisor = supervisor
        self._prompts = prompts
        self._params = params
        self._ask = ask_group
        self._max_sequences = max_sequences
        self._max_attempts = max_attempts
        self._waiting = deque(range(len(prompts)))
        self._failed: dict[int, list[PooledServer]] = {}  # servers that each group has failed on
        self._calls: dict[int, Call] = {}
        self._done: SimpleQueue[Outcome] = SimpleQueue()
        self._closed = False

    def groups(self) -> FinishedGroups:
        """Yield each group as it arrives; ending the iteration breaks off what is still under way."""
        threading.Thread(target=self._dispatch, daemon=True, name="r1-dispatch").start()
        try:
            for _ in self._prompts:
                result = self._done.get()
                if isinstance(result, BaseException):
                    raise result
                if self._closed:  # even if all groups had arrived: what a call gives must not depend on the clock
                    raise RuntimeError(ENDED)
                yield result
        finally:
            self.close()

    def close(self) -> None:
        """Break off all requests; a consumer that waits for a group gets RuntimeError."""
        with self._supervisor.changed:
            if self._closed:
                return
            self._closed = True
            calls = list(self._calls.values())
            self._supervisor.changed.notify_all()
        self._done.put(RuntimeError(ENDED))
        for call in calls:
            call.cancel()

    def _dispatch(self) -> None:
        try:
            self._hand_out()
        except BaseException as error:  # a thread's error must reach the consumer
            self._done.put(error)

    def _hand_out(self) -> None:
        """Hand out groups, in order, until the dispatch is closed. Raises ServersLost when no server is left."""
        changed = self._supervisor.changed
        deadline = time.monotonic() + self._supervisor.deadlines.recovery
        with changed:
            while not self._closed:
                if self._supervisor.ready() or self._calls:
                    deadline = time.monotonic() + self._supervisor.deadlines.recovery
                else:
                    self._supervisor.require_hope(deadline)
                index, server = self._pick()
                if server is None:
                    changed.wait(0.2)
                    continue
                self._waiting.remove(index)
                cost = self._cost(index)
                server.owed += cost
                server.sequences += self._params.n
                self._calls[index] = call = Call()
                threading.Thread(
                    target=self._serve, args=(server, index, call, cost), daemon=True, name=f"r1-group-{index}"
                ).start()

    def _pick(self) -> tuple[int, PooledServer | None]:
        """Return the next group that a server has room for, and the one of these servers that owes least.

        A group goes back to a server that it has failed on only when all others have failed it or are lost, lest a
        server that answers nonsense, and so is always idle, draws everything to itself.
        """
        room = self._max_sequences - self._params.n
        free = [server for server in self._supervisor.ready() if server.sequences <= room]
        hopeful = {server for server in self._supervisor.servers if server.state != "lost"}
        for index in self._waiting if free else ():
            failed = self._failed.get(index, [])
            fresh = [server for server in free if server not in failed] if hopeful.difference(failed) else free
            if fresh:
                return index, min(fresh, key=lambda server: server.owed)
        return -1, None

    def _cost(self, index: int) -> int:
        """Tokens that a group may take: its prompt once, shared by the samples, and all their answers."""
        return len(self._prompts[index].token_ids) + self._params.n * self._params.max_tokens

    def _serve(self, server: PooledServer, index: int, call: Call, cost: int) -> None:
        """Ask one server for one group; put the outcome where it belongs."""
        owed = cost

        def arrived(tokens: int) -> None:
            nonlocal owed
            with self._supervisor.changed:
                server.owed -= tokens
                owed -= tokens

        outcome: Outcome
        try:
            outcome = index, self._ask(server, self._prompts[index], call, arrived)
        except BaseException as error:  # a thread's error must reach the consumer
            outcome = error
        with self._supervisor.changed:
            server.owed -= owed
            server.sequences -= self._params.n
            del self._calls[index]
            if self._closed:
                return
            if isinstance(outcome, ServerFault):
                failed = self._failed.setdefault(index, [])
                failed.append(server)
                self._supervisor.fail(server, outcome)
                if len(failed) < self._max_attempts:
                    self._waiting.appendleft(index)
            elif not isinstance(outcome, BaseException):
                server.faults = 0
            self._supervisor.changed.notify_all()
            if index not in self._waiting:
                self._done.put(self._explain(index, outcome))

    def _explain(self, index: int, outcome: Outcome) -> Outcome:
        prompt = self._prompts[index].id
        if isinstance(outcome, ServerFault):
            return ServerFault(f"prompt {prompt} failed {self._max_attempts} times, at last: {outcome}")
        if isinstance(outcome, RequestRefused):
            return RequestRefused(f"prompt {prompt} was refused: {outcome}")
        return outcome
