"""Answers of environments and messages of agents in the record: one file for each sampling call."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from r1_cli.gateway.messages import ChatRequest
from r1_cli.runs.reader import ANSWERS, MEDIA
from r1_cli.train.recorder import Recorder
from r1_data.types import DataError, Message
from r1_rewards.environments.types import Actor, CallRecord, EnvironmentSetup, JsonObject, StepResult
from r1_rewards.types import Failure, Score

Answer: TypeAlias = StepResult | Score | Failure
Content: TypeAlias = Answer | ChatRequest | float | None  # of a row
SaveMedia: TypeAlias = Callable[[bytes], str]  # writes a PNG file and returns its name

SCHEMA = pa.schema(
    [
        ("episode", pa.string()),  # prompt id / sample
        ("turn", pa.int32()),  # turns of the policy before it; 0: of `reset`
        ("request", pa.string()),  # digest of what was answered
        ("steps", pa.int64()),  # of the engine, before the answer was used; null: the engine runs by itself
        ("kind", pa.string()),  # `step`, `score`, `failure`; of agents also `request`, `part`, `reward`, `turn`
        ("answer", pa.string()),  # JSON
        ("media", pa.list_(pa.string())),  # files of its pictures, in order
    ]
)

CALL_AGAIN = "; `r1 replay --tools again` calls the tools instead of the record"


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """What an environment answered, or what an agent did. A turn of the policy for an agent has the answer None."""

    episode: str
    turn: int  # turns of the policy before it
    request: str  # digest of what was answered; of an agent's turn, of its tokens
    steps: int | None  # of the engine, before the answer was used
    answer: Content  # of an agent: its end, a request, or a reward


# --- writing ----------------------------------------------------------------------------------------------------------


def write_answers(
    recorder: Recorder, answers: Sequence[RecordedAnswer], kinds: Mapping[str, Actor], version: int, seed: int
) -> None:
    """Record the answers of a call. `version` is of the weights that sampled the turns."""
    described = {name: {"tools": one.tools, "scores": one.scores} for name, one in kinds.items()}
    description = json.dumps({**described[""], "kinds": described}).encode()
    recorder.record_answers(answer_file(version, seed), partial(to_table, answers, description))


def to_table(answers: Sequence[RecordedAnswer], description: bytes, save: SaveMedia) -> pa.Table:
    """Return one row per answer. `description` is JSON of what a player must know of the environments."""
    rows = _RowWriter(save)
    for answer in answers:
        rows.add(answer)
    return pa.Table.from_pylist(rows.rows, SCHEMA.with_metadata({b"environments": description}))


def answer_file(version: int, seed: int) -> str:
    """Return the file name of a call's answers; names sort by the version of the weights."""
    return f"{version:09}-{seed:016x}.parquet"


class _RowWriter:
    """Writes answers as rows. Messages and tools that several requests share are rows of their own, `part`."""

    def __init__(self, save: SaveMedia) -> None:
        self.rows: list[JsonObject] = []
        self._save, self._parts = save, dict[int, int]()  # number of a part by its id

    def add(self, recorded: RecordedAnswer) -> None:
        answer, media = recorded.answer, list[str]()
        if isinstance(answer, ChatRequest):
            content: object = {
                "messages": [self._number(recorded, message) for message in answer.messages],
                "tools": self._number(recorded, answer.tools) if answer.tools else None,
                "max_tokens": answer.max_tokens,
                "stop": answer.stop,
                "seed": answer.seed,
            }
        elif isinstance(answer, StepResult):
            messages = [self._without_pictures(message, media) for message in answer.messages]
            content = asdict(replace(answer, messages=tuple(messages)))
        else:
            content = answer if answer is None or isinstance(answer, float) else asdict(answer)
        self._append(recorded, _kind_of(answer), content, media)

    def _number(self, recorded: RecordedAnswer, part: Any) -> int:
        """Return the number of a message, or of a request's tools; write it if it is new."""
        if id(part) not in self._parts:
            self._parts[id(part)], media = len(self._parts), list[str]()
            content = self._without_pictures(part, media) if isinstance(part, dict) else part
            self._append(recorded, "part", content, media)
        return self._parts[id(part)]

    def _without_pictures(self, message: Message, media: list[str]) -> Message:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return message
        media += [self._save(part["image"]) for part in content if part["type"] == "image"]
        return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}

    def _append(self, recorded: RecordedAnswer, kind: str, content: object, media: list[str]) -> None:
        self.rows.append(
            {
                "episode": recorded.episode,
                "turn": recorded.turn,
                "request": recorded.request,
                "steps": recorded.steps,
                "kind": kind,
                "answer": json.dumps(content, default=str),
                "media": media,
            }
        )


def _kind_of(answer: Content) -> str:
    match answer:
        case None:
            return "turn"
        case ChatRequest():
            return "request"
        case StepResult():
            return "step"
        case Score():
            return "score"
        case Failure():
            return "failure"
    return "reward"


# --- reading ----------------------------------------------------------------------------------------------------------


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

    def kinds(self, setups: Mapping[str, EnvironmentSetup]) -> dict[str, Actor]:
        """Return what is known of the environments that the run had, by kind, as `setups` are.

        Raises DataError if there is no record.
        """
        if not (paths := self.paths()):
            raise DataError(f"{self.run / ANSWERS} has no answers of tools, environments or agents{CALL_AGAIN}")
        described = json.loads((pq.read_schema(paths[0]).metadata or {})[b"environments"])
        kinds = described.get("kinds", {"": described})  # older records have one
        return {name: Actor(setup, kinds[name]["tools"], kinds[name]["scores"]) for name, setup in setups.items()}

    def read(self, seed: int) -> list[RecordedAnswer]:
        """Return the answers of the call with this seed, in order. Raises DataError if it is not in the record."""
        paths = [path for path in self.paths() if path.name.endswith(answer_file(0, seed).partition("-")[2])]
        if not paths:
            raise DataError(f"{self.run / ANSWERS} has no answers of this sampling round{CALL_AGAIN}")
        parts, found = list[Any](), list[RecordedAnswer]()
        for row in pq.read_table(paths[-1], partitioning=None).to_pylist():
            fields, names = json.loads(row["answer"]), iter(row["media"])
            if row["kind"] == "part":
                own = isinstance(fields, dict)
                parts.append(_with_pictures(fields, names, self.run / MEDIA) if own else tuple(fields))
            else:
                answer = _read_answer(row["kind"], fields, names, self.run / MEDIA, parts)
                found.append(RecordedAnswer(row["episode"], row["turn"], row["request"], row["steps"], answer))
        return found


def _read_answer(kind: str, fields: Any, names: Iterator[str], media: Path, parts: Sequence[Any]) -> Content:
    match kind:
        case "request":
            messages = tuple(parts[number] for number in fields["messages"])
            tools = () if fields["tools"] is None else parts[fields["tools"]]
            return ChatRequest(messages, tools, fields["max_tokens"], tuple(fields["stop"]), fields["seed"])
        case "step":
            calls = tuple(CallRecord(**call) for call in fields["calls"])
            messages = tuple(_with_pictures(message, names, media) for message in fields["messages"])
            return StepResult(**{**fields, "calls": calls, "messages": messages})
        case "score":
            error = fields["error"]
            return Score(**{**fields, "error": None if error is None else Failure(**error)})
        case "failure":
            return Failure(**fields)
    return None if fields is None else float(fields)


def _with_pictures(message: Message, names: Iterator[str], media: Path) -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {**part, "image": _read_media(media / Path(next(names)).name)} if part["type"] == "image" else part
        for part in content
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
        answers = AnswerRecord(again).read(seed)
        of_agents = any(one.answer is None for one in answers)
        for now in answers:
            before = then.get((now.episode, now.turn, now.request, type(now.answer)))
            for name, same in () if before is None else _compare(before.answer, now.answer):
                name = "the agent" if of_agents else name
                calls[name] = calls.get(name, 0) + 1
                if not same:
                    different[name] = different.get(name, 0) + 1
                    first.setdefault(name, f"episode {now.episode}, turn {now.turn}")
    return [
        f"{name} is not a function of its input: {count} of {calls[name]} equal calls were answered differently, "
        f"first in {first[name]}"
        for name, count in different.items()
    ]


def _compare(then: object, now: object) -> Iterator[tuple[str, bool]]:
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


def digest(value: object) -> str:
    """Return 16 characters that equal JSON values share."""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
