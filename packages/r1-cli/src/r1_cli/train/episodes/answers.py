"""Answers of tools and environments in the record, and a source that repeats them instead of calling anything."""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from r1_cli.runs.reader import ANSWERS, MEDIA
from r1_cli.train.recorder import Recorder
from r1_data.types import DataError, Message
from r1_rewards.environments.types import Actor, CallRecord, EnvironmentSetup, JsonObject, PolicyTurn, StepResult
from r1_rewards.types import Failure, Score
from r1_rollout.types import GenerationSession

Answer: TypeAlias = StepResult | Score | Failure
SaveMedia: TypeAlias = Callable[[bytes], str]  # writes a PNG file and returns its name

SCHEMA = pa.schema(
    [
        ("episode", pa.string()),  # prompt id / sample
        ("turn", pa.int32()),  # turns of the policy before it; 0: of `reset`
        ("request", pa.string()),  # digest of what was answered
        ("steps", pa.int64()),  # of the engine, before the answer was used; null: the engine runs by itself
        ("kind", pa.string()),  # `step`, `score` or `failure`
        ("answer", pa.string()),  # JSON
        ("media", pa.list_(pa.string())),  # files of its pictures, in order
    ]
)


class Environments(Protocol):
    """What answers the policy, see `EnvironmentPool`."""

    setup: EnvironmentSetup
    tools: list[JsonObject]
    scores: bool

    @property
    def kinds(self) -> Mapping[str, Actor]: ...
    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None: ...
    def step(self, key: str, turn: PolicyTurn) -> None: ...
    def finish(self, key: str) -> None: ...
    def cancel(self, key: str) -> None: ...
    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]: ...


# (environments, the engine's session, seed of the call) -> what answers in this call
AnswerSource: TypeAlias = Callable[[Environments, GenerationSession, int], AbstractContextManager[Environments]]


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    episode: str
    turn: int  # turns of the policy before it
    request: str  # digest of what was answered
    steps: int | None  # of the engine, before the answer was used
    answer: Answer


class Requests:
    """What each open episode has asked last: its number of turns, and a digest."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[int, str]] = {}

    def start(self, key: str) -> None:
        self._open[key] = 0, ""

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._open[key] = self._open[key][0] + 1, _digest([turn.text, [asdict(call) for call in turn.calls], turn.cut])

    def drop(self, key: str) -> None:
        self._open.pop(key, None)

    def __getitem__(self, key: str) -> tuple[int, str]:
        return self._open[key]

    def __contains__(self, key: str) -> bool:
        return key in self._open


# --- writing ----------------------------------------------------------------------------------------------------------


class RecordingEnvironments:
    """Environments whose answers are noted in the order in which the player used them."""

    def __init__(self, environments: Environments, session: GenerationSession) -> None:
        self.setup, self.tools, self.scores = environments.setup, environments.tools, environments.scores
        self.kinds = environments.kinds
        self.answers: list[RecordedAnswer] = []
        self.version = 0  # of the weights that sampled the turns
        self._environments, self._session, self._requests = environments, session, Requests()

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None:
        self._environments.start(key, row, images, kind=kind)
        self._requests.start(key)

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._environments.step(key, turn)
        self._requests.step(key, turn)

    def finish(self, key: str) -> None:
        self._environments.finish(key)

    def cancel(self, key: str) -> None:
        self._environments.cancel(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]:
        found = self._environments.poll(timeout)
        self.answers += [
            RecordedAnswer(key, *self._requests[key], self._session.steps, answer) for key, answer in found
        ]
        return found


def record_answers(recorder: Recorder) -> AnswerSource:
    """Return what records the answers of each call that ends well."""

    @contextmanager
    def source(environments: Environments, session: GenerationSession, seed: int) -> Iterator[RecordingEnvironments]:
        recording = RecordingEnvironments(environments, session)
        yield recording
        kinds = {name: {"tools": one.tools, "scores": one.scores} for name, one in environments.kinds.items()}
        described = json.dumps({**kinds[""], "kinds": kinds}).encode()
        recorder.record_answers(answer_file(recording.version, seed), partial(to_table, recording.answers, described))

    return source


def to_table(answers: Sequence[RecordedAnswer], description: bytes, save: SaveMedia) -> pa.Table:
    """Return one row per answer. `description` is JSON of what a player must know of the environments."""
    rows = [_to_row(answer, save) for answer in answers]
    return pa.Table.from_pylist(rows, SCHEMA.with_metadata({b"environments": description}))


def answer_file(version: int, seed: int) -> str:
    """Return the file name of a call's answers; names sort by the version of the weights."""
    return f"{version:09}-{seed:016x}.parquet"


def _to_row(recorded: RecordedAnswer, save: SaveMedia) -> JsonObject:
    media = list[str]()

    def without_picture(part: JsonObject) -> JsonObject:
        if part["type"] != "image":
            return part
        media.append(save(part["image"]))
        return {"type": "image"}

    answer = recorded.answer
    if isinstance(answer, StepResult):
        messages = [
            message
            if isinstance(message["content"], str)
            else {**message, "content": [*map(without_picture, message["content"])]}
            for message in answer.messages
        ]
        answer = replace(answer, messages=tuple(messages))
    kind = "step" if isinstance(answer, StepResult) else "score" if isinstance(answer, Score) else "failure"
    return {
        "episode": recorded.episode,
        "turn": recorded.turn,
        "request": recorded.request,
        "steps": recorded.steps,
        "kind": kind,
        "answer": json.dumps(asdict(answer), default=str),
        "media": media,
    }


# --- reading ----------------------------------------------------------------------------------------------------------


class RecordedEnvironments:
    """Repeats the answers of one call: each when the engine has taken as many steps as then.

    Where the engine's steps are not known, an answer comes as soon as it is asked for.
    """

    def __init__(
        self,
        kinds: Mapping[str, Actor],
        answers: Sequence[RecordedAnswer] = (),
        session: GenerationSession | None = None,
    ) -> None:
        self.kinds = kinds
        self.setup, self.tools, self.scores = kinds[""].setup, kinds[""].tools, kinds[""].scores
        self._answers, self._session, self._requests = deque(answers), session, Requests()
        self._asked: set[str] = set()

    def start(self, key: str, row: Mapping[str, object], images: Sequence[object] = (), *, kind: str = "") -> None:
        self._requests.start(key)
        self._asked.add(key)

    def step(self, key: str, turn: PolicyTurn) -> None:
        self._requests.step(key, turn)
        self._asked.add(key)

    def finish(self, key: str) -> None:
        self._asked.add(key)

    def cancel(self, key: str) -> None:
        self._requests.drop(key)
        self._asked.discard(key)

    def poll(self, timeout: float | None = None) -> list[tuple[str, Answer]]:
        """Return the answers that are due. Raises DataError if there is none of what an episode asks for."""
        steps = None if self._session is None else self._session.steps
        found, later = dict[str, Answer](), deque[RecordedAnswer]()
        while self._answers:
            one = self._answers.popleft()
            exact = steps is not None and one.steps is not None
            idle = timeout is None and not found  # the engine waits, so the next answer is the one that came then
            ready = one.episode not in found and self._is_ready(one)
            if ready and (not exact or idle or (one.steps or 0) <= (steps or 0)):
                found[one.episode] = self._take(one)
                steps = one.steps if exact and idle else steps
            else:
                later.append(one)
                if exact:
                    break  # the order of answers is that of then
        self._answers.extendleft(reversed(later))
        if timeout is None and self._asked and not found:
            key = min(self._asked)
            raise DataError(f"episode {key}: the record has no answer to turn {self._requests[key][0]}{CALL_AGAIN}")
        return list(found.items())

    def _is_ready(self, one: RecordedAnswer) -> bool:
        """Whether an episode waits for this answer. A failure comes unasked, behind the same turns."""
        if one.episode not in self._requests:
            return False
        asked = one.episode in self._asked or isinstance(one.answer, Failure)
        return asked and self._requests[one.episode][0] == one.turn

    def _take(self, one: RecordedAnswer) -> Answer:
        if self._requests[one.episode][1] != one.request:
            raise DataError(f"episode {one.episode}: turn {one.turn} is not the recorded one{CALL_AGAIN}")
        self._asked.discard(one.episode)
        if isinstance(one.answer, Score | Failure):
            self._requests.drop(one.episode)
        return one.answer


CALL_AGAIN = "; `r1 replay --tools again` calls the tools instead of the record"


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The recorded answers of a run. Example: `AnswerRecord(Path("checkpoints/easy_r1/demo"))`."""

    run: Path

    def paths(self) -> list[Path]:
        return sorted((self.run / ANSWERS).glob("*.parquet"))

    def has_steps(self) -> bool:
        """Whether the engine's steps before each answer are known."""
        paths = self.paths()
        return bool(paths) and not pq.read_table(paths[-1], columns=["steps"], partitioning=None)["steps"].null_count

    def environments(self, setups: Mapping[str, EnvironmentSetup]) -> RecordedEnvironments:
        """Return environments as the run had them, without answers. Raises DataError if there is no record.

        `setups` are by kind, as `EnvironmentPool.kinds`.
        """
        if not (paths := self.paths()):
            raise DataError(f"{self.run / ANSWERS} has no answers of tools and environments{CALL_AGAIN}")
        described = json.loads((pq.read_schema(paths[0]).metadata or {})[b"environments"])
        kinds = described.get("kinds", {"": described})  # older records have one
        return RecordedEnvironments(
            {name: Actor(setup, kinds[name]["tools"], kinds[name]["scores"]) for name, setup in setups.items()}
        )

    @contextmanager
    def replay(
        self, environments: Environments, session: GenerationSession, seed: int
    ) -> Iterator[RecordedEnvironments]:
        """Yield what repeats the answers of the call with this seed. Raises DataError if it is not in the record."""
        yield RecordedEnvironments(environments.kinds, self.read(seed), session)

    def read(self, seed: int) -> list[RecordedAnswer]:
        """Return the answers of the call with this seed, in order. Raises DataError if it is not in the record."""
        paths = [path for path in self.paths() if path.name.endswith(answer_file(0, seed).partition("-")[2])]
        if not paths:
            raise DataError(f"{self.run / ANSWERS} has no answers of this sampling round{CALL_AGAIN}")
        return [_from_row(row, self.run / MEDIA) for row in pq.read_table(paths[-1], partitioning=None).to_pylist()]


def _from_row(row: Mapping[str, Any], media: Path) -> RecordedAnswer:
    fields, names = json.loads(row["answer"]), iter(row["media"])
    answer: Answer
    if row["kind"] == "step":
        calls = tuple(CallRecord(**call) for call in fields["calls"])
        messages = tuple(_with_pictures(message, names, media) for message in fields["messages"])
        answer = StepResult(**{**fields, "calls": calls, "messages": messages})
    elif row["kind"] == "score":
        error = fields["error"]
        answer = Score(**{**fields, "error": None if error is None else Failure(**error)})
    else:
        answer = Failure(**fields)
    return RecordedAnswer(row["episode"], row["turn"], row["request"], row["steps"], answer)


def _with_pictures(message: Message, names: Iterator[str], media: Path) -> Message:
    if isinstance(message["content"], str):
        return message
    parts = [
        {**part, "image": _read_media(media / Path(next(names)).name)} if part["type"] == "image" else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _read_media(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"the recorded picture {path} cannot be read ({error.strerror}){CALL_AGAIN}") from error


# --- comparing --------------------------------------------------------------------------------------------------------


def compare_answers(run: Path, again: Path) -> list[str]:
    """Return which tools answered the same call differently, with how often and where first."""
    calls, different, first = dict[str, int](), dict[str, int](), dict[str, str]()
    for path in AnswerRecord(again).paths():
        seed = int(path.stem.partition("-")[2], 16)
        try:
            then = {(one.episode, one.turn, one.request, type(one.answer)): one for one in AnswerRecord(run).read(seed)}
        except DataError:
            continue
        for now in AnswerRecord(again).read(seed):
            before = then.get((now.episode, now.turn, now.request, type(now.answer)))
            for name, same in () if before is None else _compare(before.answer, now.answer):
                calls[name] = calls.get(name, 0) + 1
                if not same:
                    different[name] = different.get(name, 0) + 1
                    first.setdefault(name, f"episode {now.episode}, turn {now.turn}")
    return [
        f"{name} is not a function of its input: {count} of {calls[name]} equal calls were answered differently, "
        f"first in {first[name]}"
        for name, count in different.items()
    ]


def _compare(then: Answer, now: Answer) -> Iterator[tuple[str, bool]]:
    """Yield each tool, and whether it answered alike."""
    if not isinstance(then, StepResult) or not isinstance(now, StepResult):
        yield "score()" if isinstance(now, Score) else "the environment", then == now
        return
    if not now.calls and not now.messages:
        return
    rest = [(one.reward, one.done, one.state) for one in (then, now)]
    if len(now.calls) == len(now.messages) == len(then.messages) == len(then.calls):
        for call, before, after in zip(now.calls, then.messages, now.messages, strict=True):
            yield f"tool {call.name}" if call.name != "step" else "step()", before == after and rest[0] == rest[1]
    else:
        yield "step()" if now.calls else "reset()", then.messages == now.messages and rest[0] == rest[1]


def _digest(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
