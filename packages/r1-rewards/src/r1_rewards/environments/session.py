"""One open episode on the caller's side: the jobs that a turn needs, and the answer made of their replies."""

import base64
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from r1_rewards.environments.results import MAX_ERROR, NO_MORE_PICTURES
from r1_rewards.environments.schema import check_arguments
from r1_rewards.environments.types import (
    Actor,
    CallRecord,
    EnvironmentSetup,
    EnvironmentSpecError,
    JsonObject,
    Message,
    PolicyTurn,
    StepResult,
)
from r1_rewards.types import Failure, RewardSpecError, Score, read_score, suggest
from r1_rewards.workers.frames import check_json, unpack
from r1_rewards.workers.process import GARBLED, ForkServer, Worker, WorkerCrash

Answer = StepResult | Score | Failure


@dataclass(eq=False, slots=True)
class CallJob:
    """A request for a worker. `index` is its call in the turn; `expected` is set for one that is played again."""

    session: "EpisodeSession"
    request: JsonObject
    index: int = 0
    worker: Worker | None = None
    began: float = 0.0  # `time.monotonic`
    waited: float = 0.0  # seconds that the worker had waited for a processor before
    tries: int = 0
    expected: str | None = None  # digest of the reply


@dataclass(frozen=True, slots=True)
class Description:
    """What the workers have loaded, see `shapes.Loaded`."""

    shape: str
    tools: list[JsonObject]
    fills: Mapping[str, Sequence[str]]  # keyword-only parameters by tool
    needs: Mapping[str, Sequence[str]]  # those without a default
    scores: bool
    rewards: bool
    closes: bool
    deterministic: bool
    wants_pictures: bool


@dataclass(frozen=True, slots=True)
class Kind(Actor):
    """Tools, an environment or an agent that is loaded, and the process that starts its workers."""

    loaded: Description
    server: ForkServer


def load_kind(setup: EnvironmentSetup, cpu_seconds: float) -> Kind:
    """Load a setup's code in a new process. Raises EnvironmentSpecError if it cannot be loaded."""
    check_json(setup.environment_kwargs, "environment_kwargs")
    check_json(setup.tool_kwargs, "tool_kwargs")
    message = {**asdict(setup), "tools": list(setup.tools), "cpu_seconds": cpu_seconds}
    server = ForkServer("r1_rewards.environments.worker", "environment", message)
    try:
        reply = server.load()
        loaded = Description(**{key: reply[key] for key in Description.__dataclass_fields__})
        return Kind(setup, loaded.tools, loaded.scores, loaded, server)
    except RewardSpecError as error:
        raise EnvironmentSpecError(str(error)) from error
    except WorkerCrash as error:
        raise EnvironmentSpecError(f"environment {setup.name!r}: {error}") from error
    except KeyError as error:
        server.close()
        server.dispose()
        raise EnvironmentSpecError(GARBLED.format("environment")) from error


@dataclass(eq=False, slots=True)
class EpisodeSession:
    """An episode's environment. The scheduler runs the jobs that `begin`, `take_turn` and `take_reply` return."""

    key: str
    serial: int
    row: Mapping[str, object]
    pictures: Sequence[JsonObject]  # as `frames.encode_picture` returns them
    kind: Kind
    began: float = field(default_factory=time.monotonic)
    worker: Worker | None = None  # of a stateful environment
    ended: bool = False
    history: list[CallJob] = field(default_factory=list)  # answered, to be played again
    queue: deque[CallJob] = field(default_factory=deque)  # of a stateful environment: one at a time
    running: set[CallJob] = field(default_factory=set)
    address: Mapping[str, str] = field(default_factory=dict)  # base_url and api_key of an agent's server
    _images_left: int = 0
    _calls: list[CallRecord] = field(default_factory=list)
    _contents: list[list[JsonObject]] = field(default_factory=list)
    _turn: PolicyTurn | None = None
    _result: StepResult = field(default_factory=StepResult)  # without messages and calls
    _open: int = 0  # jobs of the turn without a reply

    def __post_init__(self) -> None:
        self._images_left = self.setup.max_images

    @property
    def setup(self) -> EnvironmentSetup:
        return self.kind.setup

    @property
    def loaded(self) -> Description:
        return self.kind.loaded

    @property
    def stateful(self) -> bool:
        return self.loaded.shape != "tools"

    def begin(self) -> list[CallJob] | Answer:
        row = {"row": dict(self.row), "images": list(self.pictures)}
        if self.loaded.shape == "agent":
            self._calls, self._contents = [CallRecord("agent", {}, 0.0)], [[]]
            return self._open_jobs(
                [CallJob(self, {"op": "run", **row, "address": dict(self.address), "max_images": 0})]
            )
        if self.stateful:
            return self._open_jobs([CallJob(self, {"op": "reset", **row, "max_images": self._images_left})])
        for tool, names in self.loaded.needs.items():
            for name in names:
                if name == "image" and not self.pictures:
                    return Failure("exception", f"the tool {tool!r} asks for a picture, and the row has none")
                if name not in ("row", "image", "images") and name not in self.row:
                    missing = f"the tool {tool!r} asks for the column {name!r}, which the row lacks"
                    return Failure("exception", missing + suggest(name, self.row))
        return StepResult()

    def take_turn(self, turn: PolicyTurn) -> list[CallJob] | Answer:
        self._turn, self._result = turn, StepResult()
        if self.loaded.shape == "gym":
            self._calls, self._contents = [CallRecord("step", {}, 0.0)], [[]]
            request = {"op": "step", "text": turn.text, "max_images": self._images_left}
            return self._open_jobs([CallJob(self, request)])
        if not turn.calls:
            return StepResult(done=True)
        self._calls = [
            CallRecord(call.name, dict(call.arguments) if isinstance(call.arguments, Mapping) else {}, 0.0)
            for call in turn.calls
        ]
        self._contents = [[] for _ in turn.calls]
        schemas = {tool["function"]["name"]: tool["function"] for tool in self.loaded.tools}
        jobs, ids = list[CallJob](), set[str]()
        for index, call in enumerate(turn.calls):
            error, cause = call.error, "malformed"
            arguments: dict[str, Any] = {}
            if not error and turn.cut:
                error = "the turn was cut off by its limit of tokens; nothing was executed"
            elif not error and call.id and call.id in ids:
                error = f"the id {call.id[:80]!r} was used by another call of this turn"
            elif not error and call.name not in schemas:
                error = f"there is no tool {call.name[:80]!r}" + suggest(call.name[:80], schemas)
            elif not error:
                try:
                    arguments = check_arguments(call.arguments, schemas[call.name]["parameters"])
                    json.dumps(arguments)
                except (ValueError, TypeError) as problem:
                    error = f"{call.name}: {problem}"
                except RecursionError:
                    error = f"{call.name}: the arguments are nested too deeply"
            ids.add(call.id)
            if not error and len(jobs) == self.setup.max_parallel_calls:
                error, cause = f"only {len(jobs)} calls are executed in a turn", "limit"
            if error:
                self._fail_call(index, error, cause)
            else:
                jobs.append(CallJob(self, self._call_request(call.name, arguments), index))
        return self._open_jobs(jobs) if jobs else self._assemble()

    def finish(self) -> list[CallJob]:
        return self._open_jobs([CallJob(self, {"op": "score", "max_images": 0})])

    def take_reply(self, job: CallJob, reply: Any, now: float) -> Answer | None:
        """Return the episode's answer if this was the last reply that it needs. Raises ValueError if it is garbled."""
        seconds = max(0.0, now - job.began)
        operation = job.request["op"]
        if not isinstance(reply, Mapping) or not reply.keys() & {"result", "error", "score"}:
            raise ValueError("a message that is no reply")
        if operation in ("call", "run"):
            self._calls[job.index] = replace(self._calls[job.index], seconds=seconds)
        elif operation == "step":
            self._calls[0] = replace(self._calls[0], seconds=seconds)
        if "error" in reply:
            error, cause = str(reply["error"]), reply["cause"]
            if operation != "call":
                return Failure(cause, f"{self._name_of(job)} failed: {error}{reply['where']}")
            self._fail_call(job.index, error, cause)
        elif operation in ("score", "run") and "score" in reply:
            return unpack(reply["score"])
        elif failure := self._take_result(job, reply["result"]):
            return failure
        if self.stateful and self.loaded.deterministic:
            job.expected = digest(reply)
            self.history.append(job)
        return self._close_job()

    def lose_job(self, job: CallJob, failure: Failure, now: float) -> Answer | None:
        """Answer a job whose worker is lost: an error text for the policy, or the episode's failure."""
        if job.request["op"] != "call" or (self.stateful and not self.loaded.deterministic):
            return Failure(failure.cause, f"{self._name_of(job)}: {failure.message}")
        self._calls[job.index] = replace(self._calls[job.index], seconds=max(0.0, now - job.began))
        self._fail_call(job.index, failure.message, failure.cause)
        return self._close_job()

    def drop_calls(self) -> StepResult:
        """Answer the calls that wait with an error text: the episode was over before them."""
        for job in self.queue:
            self._fail_call(job.index, "the episode was over before this call", "limit")
        self.queue.clear()
        return self._assemble()

    def _open_jobs(self, jobs: list[CallJob]) -> list[CallJob]:
        self._open = len(jobs)
        return jobs

    def _close_job(self) -> Answer | None:
        self._open -= 1
        if self.stateful and self._result.done and self._open:
            return self.drop_calls()
        return None if self._open else self._assemble()

    def _call_request(self, name: str, arguments: Mapping[str, Any]) -> JsonObject:
        request = {"op": "call", "tool": name, "arguments": arguments, "max_images": self._images_left}
        if self.stateful:
            return request
        fills = self.loaded.fills[name]
        pictures = list(self.pictures) if {"image", "images"} & {*fills} else []
        return {**request, "row": dict(self.row) if fills else {}, "images": pictures}

    def _take_result(self, job: CallJob, result: Mapping[str, Any]) -> Failure | None:
        reward = read_score(result["reward"])
        if isinstance(reward, Failure):
            return Failure(reward.cause, f"{self._name_of(job)} returned a reward that is no finite number")
        before, state = self._result, result["state"]
        self._result = replace(
            before,
            reward=before.reward + reward.value,
            done=before.done or bool(result["done"]),
            state=before.state if state is None else str(state),
        )
        parts = list(result["parts"])
        if job.request["op"] == "reset":
            self._turn, self._calls, self._contents = None, [], [parts]
            return None
        self._contents[job.index] = parts
        self._calls[job.index] = replace(
            self._calls[job.index], truncated=int(result["truncated"]), replaced=int(result["replaced"])
        )
        return None

    def _fail_call(self, index: int, error: str, cause: str) -> None:
        text = f"error: {error}"[:MAX_ERROR].encode("utf-8", "replace").decode()
        self._calls[index] = replace(self._calls[index], error=text, cause=cause)
        self._contents[index] = [{"type": "text", "text": text}]

    def _assemble(self) -> StepResult:
        contents = [self._read_parts(parts) for parts in self._contents]
        messages = list[Message]()
        if self._turn is None or self.loaded.shape == "gym":
            quiet = self._turn is None or self._result.done  # then nothing needs to be said
            messages = [{"role": "user", "content": content} for content in contents if content or not quiet]
        else:
            for call, content in zip(self._turn.calls, contents, strict=True):
                named = {"tool_call_id": call.id} if call.id else {}
                messages.append({"role": "tool", "name": call.name, **named, "content": content})
        return replace(self._result, messages=tuple(messages), calls=tuple(self._calls))

    def _read_parts(self, parts: Sequence[Mapping[str, Any]]) -> str | list[JsonObject]:
        found = list[JsonObject]()
        for part in parts:
            if part["type"] == "text":
                found.append({"type": "text", "text": str(part["text"])})
            elif self._images_left:
                self._images_left -= 1
                found.append({"type": "image", "image": base64.b64decode(part["image"])})
            else:
                found.append({"type": "text", "text": NO_MORE_PICTURES})
        if all(part["type"] == "text" for part in found):
            return "".join(part["text"] for part in found)
        return found

    def _name_of(self, job: CallJob) -> str:
        operation = job.request["op"]
        names = {"call": f"{job.request.get('tool')}()", "run": "the agent"}
        return names.get(operation, f"{operation}()")


def digest(reply: object) -> str:
    return hashlib.sha256(json.dumps(reply, sort_keys=True).encode()).hexdigest()
