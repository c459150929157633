"""Record every response of a run, one parquet file per step, with the pictures and videos of prompts."""

import hashlib
import io
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from r1_cli.checkpoint.background import Background
from r1_cli.runs.reader import ANSWERS, FORKED, MEDIA, SAMPLES, Phase, RunReader, sample_file
from r1_cli.runs.schema import COLUMNS, SCHEMA, write_table
from r1_cli.runs.track import Generation
from r1_cli.runs.track.timing import Record
from r1_cli.train.groups.group import Group, Response, as_episode, paths_of
from r1_core.types import TOP_FIELDS, Sample, tokens
from r1_data.types import Demonstration, Prompt
from r1_rollout.types import Completion

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

    from r1_cli.train.groups.trajectory import Trajectory

    Shown = Prompt | Trajectory | Demonstration  # what has pictures

log = logging.getLogger("r1")

ROOM = 2  # steps that may wait in memory to be written
OF_THE_LEARNER = ("old_logprobs", "entropies", "ref_logprobs", "teacher_logprobs", *TOP_FIELDS, "advantages")


KEPT = 10  # newest skipped steps that are never deleted
FRAMES = 16  # of a video that are kept, evenly spread
FRAME_MILLISECONDS = 250


class Recorder:
    """Writes the samples of a run's steps to `samples/` and `media/` of its folder, and answers to `answers/`.

    A step repeated after a resume replaces its file. What a full disk refuses waits in memory, at most
    the newest `ROOM` steps. After another error the recorder warns and stops; the run continues.
    """

    def __init__(self, folder: Path, most: int, ended: Record = lambda name, begin, end: None) -> None:
        """Start recording; the oldest steps are deleted above `most` bytes. 0 records nothing."""
        self._folder, self._media, self._most, self._ended = folder, MediaFolder(folder / MEDIA), most, ended
        self._thread = Background("r1-recording", ROOM)
        self._on = most > 0
        self._dropped = False
        self._held: Sequence[Group] = ()  # of the current step
        self._taken: int | None = None  # bytes on disk
        self._waiting: deque[tuple[Path, Callable[[], pa.Table]]] = deque()
        self._failing = False

    def record(self, step: int, phase: Phase, groups: Sequence[Group], samples: Sequence[Sample] = ()) -> None:
        """Write a step's responses in the background. Blocks only while earlier steps wait."""
        if phase == "train":
            self._held = ()
        self.record_table(step, phase, partial(to_table, step, phase, groups, samples))

    def hold(self, groups: Sequence[Group]) -> None:
        """Remember the responses of a step until `record`, for the case that the step fails."""
        self._held = groups

    def record_held(self, step: int) -> Path | None:
        """Write the responses of a step that failed, if it has some; return their file."""
        held, self._held = self._held, ()
        if not held or not self._on:
            return None
        self.record(step, "train", held)
        return self._folder / SAMPLES / sample_file(step, "train")

    def record_table(
        self, step: int, phase: Phase, to_table: "Callable[[Callable[[Shown], list[str]]], pa.Table]"
    ) -> None:
        """Write a table with the columns of `runs.schema` in the background. `to_table` gets what saves media."""
        if self._on:
            self._thread.do(partial(self._write, SAMPLES, sample_file(step, phase), lambda: to_table(self._media.save)))

    def record_answers(self, name: str, to_table: "Callable[[Callable[[bytes], str]], pa.Table]") -> None:
        """Write what environments answered in a sampling call. `to_table` gets what saves a PNG file."""
        if self._on:
            self._thread.do(partial(self._write, ANSWERS, name, lambda: to_table(self._media.save_png)))

    def flush(self) -> None:
        if self._on:
            self._thread.do(self._write_waiting).result()

    def close(self) -> None:
        self.flush()
        self._thread.close()

    def _write(self, folder: str, name: str, to_table: Callable[[], pa.Table]) -> None:
        if not self._on:
            return
        begin = time.perf_counter()
        self._waiting.append((self._folder / folder / name, to_table))
        self._write_waiting()
        self._ended("record", begin, time.perf_counter())

    def _write_waiting(self) -> None:
        try:
            while self._waiting:
                path, to_table = self._waiting[0]
                write_table(to_table(), path)
                self._waiting.popleft()
                if self._count(path) > self._most:
                    self._make_room(path)
            self._failing = False
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        path, _ = self._waiting[0] if self._waiting else (self._folder, None)
        self._on = isinstance(error, OSError)
        what = f"wait in memory, at most the newest {ROOM}" if self._on else "are not recorded from here on"
        if not (self._on and self._failing):
            log.warning("%s could not be written: %s: %s; samples %s", path, type(error).__name__, error, what)
        self._failing = True
        if not self._on:
            self._waiting.clear()
        elif len(self._waiting) > ROOM:
            log.warning("%s is lost", self._waiting.popleft()[0])

    def _count(self, written: Path) -> int:
        if self._taken is None:
            self._taken = sum(path.stat().st_size for path in self._files())
        else:
            self._taken += written.stat().st_size + self._media.written
        self._media.written = 0
        return self._taken

    def _files(self) -> list[Path]:
        return [*self._tables(), *self._media.folder.glob("*.*")]

    def _tables(self) -> list[Path]:
        """Return the files of steps, the oldest first."""
        found = [path for name in (SAMPLES, ANSWERS) for path in (self._folder / name).glob("*.parquet")]
        return sorted(found, key=lambda path: path.name)

    def _skipped(self) -> list[int]:
        """Return the steps whose gradient was not finite, which the log of the run has as null."""
        return [row["step"] for row in RunReader(self._folder).records() if row.get("actor/grad_norm", 0.0) is None]

    def _make_room(self, newest: Path) -> None:
        """Delete the oldest steps, a tenth at a time, and media that only they show."""
        if not self._dropped:
            log.warning("the record has reached trainer.record_gb: its oldest steps are deleted")
            self._dropped = True
        sizes = {path: path.stat().st_size for path in self._files()}
        kept = {newest.name, *(sample_file(step, "train") for step in self._skipped()[-KEPT:])}
        steps = [path for path in self._tables() if path.name not in kept]
        while steps and sum(sizes.values()) > self._most:
            leaving, steps = steps[: 1 + len(steps) // 10], steps[1 + len(steps) // 10 :]
            staying = [*steps, *(path for path in self._tables() if path.name in kept)]
            shown = {name for path in staying for name in _media_of(path)}
            media = [path for path in sizes if path.parent == self._media.folder and path.name not in shown]
            for path in [*leaving, *media]:
                path.unlink()
                del sizes[path]
        self._taken = sum(sizes.values())


def _media_of(path: Path) -> set[str]:
    column = pq.read_table(path, columns=["media"])["media"]
    return {name for names in column.to_pylist() for name in names or ()}


@dataclass(frozen=True, slots=True)
class Answer:
    """What one row shows: a response, or one path of an episode."""

    place: int  # of the group
    index: int  # of the response in its group
    group: Group
    path: Completion

    @property
    def response(self) -> Response:
        return self.group.responses[self.index]

    @property
    def is_fork(self) -> bool:
        return self.path is not self.response.completion

    @property
    def prompt(self) -> Prompt:
        episode = as_episode(self.path)
        return self.group.prompt if episode is None or episode.prompt is None else episode.prompt

    @property
    def text(self) -> str:
        episode = as_episode(self.path) if self.is_fork else None
        return self.response.text if episode is None else episode.text


def to_table(
    step: int, phase: Phase, groups: Sequence[Group], samples: Sequence[Sample], media: "Callable[[Shown], list[str]]"
) -> pa.Table:
    """Return one row per response, or per path of an episode, group after group.

    Args:
        samples: the trained samples in the same order; none in a validation.
        media: gives the files of a prompt's pictures and videos.
    """
    answers = [
        Answer(place, index, group, path)
        for place, group in enumerate(groups)
        for index, one in enumerate(group.responses)
        for path in paths_of(one.completion)
    ]
    prompts = [one.prompt for one in answers]
    files = {id(prompt): media(prompt) for prompt in {id(prompt): prompt for prompt in prompts}.values()}
    columns: dict[str, Any] = {
        "step": [step] * len(answers),
        "phase": [phase] * len(answers),
        "group": [one.place for one in answers],
        "sample": [one.index for one in answers],
        "prompt_id": [clean(prompt.id) for prompt in prompts],
        "source": [clean(one.group.data_source) for one in answers],
        "prompt": [clean(prompt.text) for prompt in prompts],
        "answer": [clean(one.text) for one in answers],
        "ground_truth": [clean(prompt.ground_truth) for prompt in prompts],
        "media": [files[id(prompt)] for prompt in prompts],
        "prompt_tokens": list_column([np.asarray(prompt.token_ids, np.int32) for prompt in prompts], np.int32),
        "tokens": list_column([one.path.token_ids for one in answers], np.int32),
        "rollout_logprobs": list_column([one.path.logprobs for one in answers], np.float32),
        "finish_reason": [one.path.finish_reason for one in answers],
        "weight_version": [one.path.weight_version for one in answers],
        **_score_columns(answers),
    }
    columns |= _episode_columns(answers, columns["media"], media)
    marks = [episode.sampled if (episode := as_episode(one.path)) else None for one in answers]
    lengths = [len(one.path.token_ids) for one in answers]
    for name in OF_THE_LEARNER:
        columns[name] = token_column(samples, name, lengths, marks)
    arrays = [
        columns[column.name]
        if isinstance(columns[column.name], pa.Array)
        else pa.array(columns[column.name], column.type)
        for column in COLUMNS
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _score_columns(answers: Sequence[Answer]) -> dict[str, Any]:
    scores = [one.response.score for one in answers]
    return {
        "score": [score.value for score in scores],
        "reward": [one.response.reward for one in answers],
        "parts": [[(clean(name), float(value)) for name, value in score.parts.items()] for score in scores],
        "extracted": [None if score.extracted is None else clean(score.extracted) for score in scores],
        "reason": [clean(one.response.score.reason or one.group.truth_problem or "") for one in answers],
        "failure": [clean(f"{e.cause}: {e.message}") if (e := score.error) else None for score in scores],
    }


def _episode_columns(
    answers: Sequence[Answer], files: list[list[str]], media: "Callable[[Shown], list[str]]"
) -> dict[str, Any]:
    """Return the columns of episodes, null for single responses; `files` are those of the prompts, as `media` gives."""
    episodes = [as_episode(one.path) for one in answers]
    if not any(episodes):
        return {name: [None] * len(answers) for name in ("sampled", "turns", "stop_reason", "episode")}
    from r1_cli.train.groups.trajectory import describe_turns

    columns: dict[str, list[Any]] = {
        "sampled": [None if one is None else one.sampled.tolist() for one in episodes],
        "turns": [None if one is None else describe_turns(one) for one in episodes],
        "stop_reason": [None if one is None else one.stop_reason for one in episodes],
        "media": [own + media(one) if one is not None else own for own, one in zip(files, episodes, strict=True)],
        "episode": [None] * len(answers),
    }
    number = 0
    for row, one in enumerate(answers):
        if (whole := as_episode(one.response.completion)) and whole.forks:
            columns["episode"][row] = number
        if one.is_fork:
            columns["stop_reason"][row] = FORKED
        else:
            number += 1
    return columns


def token_column(
    samples: Sequence[Sample], name: str, lengths: Sequence[int], marks: "Sequence[NDArray[np.bool_] | None]"
) -> pa.Array:
    """Return a field of the trained tokens as one list per sample, of lists if it is [L, k]; null if samples lack it.

    Of an episode the list covers the environment's tokens, too, with 0.
    """
    if not samples or any(sample.get(name) is None for sample in samples):
        return pa.nulls(len(lengths), SCHEMA.field(name).type)
    found = tokens(samples, name).cpu()
    values = (found.float() if found.is_floating_point() else found).numpy()
    if any(mark is not None for mark in marks):
        trained = np.concatenate([np.ones(n, bool) if m is None else m for n, m in zip(lengths, marks, strict=True)])
        spread = np.zeros((len(trained), *values.shape[1:]), values.dtype)
        spread[trained] = values
        values = spread
    flat = pa.array(values.ravel())
    return _cut(flat if values.ndim == 1 else _cut(flat, [values.shape[1]] * len(values)), lengths)


def list_column(values: Sequence[Any], dtype: Any) -> pa.Array:
    """Return arrays as one column, without Python objects for numbers."""
    flat = np.concatenate([np.empty(0, dtype), *values]).astype(dtype, copy=False)
    return _cut(pa.array(flat), [*map(len, values)])


def _cut(flat: pa.Array, lengths: Sequence[int]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(np.cumsum([0, *lengths], dtype=np.int32)), flat)


def clean(text: object) -> str:
    """Replace lone surrogates of broken files, which UTF-8 cannot hold, by question marks."""
    return str(text).encode("utf-8", "replace").decode()


class MediaFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written = 0  # bytes, by this process

    def save(self, shown: "Shown") -> list[str]:
        """Write the missing pictures and videos of a prompt or an episode; return all file names in order."""
        pictures = [self._save([picture]) for picture in shown.images]
        return pictures + [self._save(_frames(video)) for video in shown.videos]

    def _save(self, frames: "list[Image]") -> str:
        digest = hashlib.blake2b(digest_size=16)
        for frame in frames:
            digest.update(f"{frame.mode} {frame.size} ".encode())
            digest.update(frame.tobytes())
        name = f"{digest.hexdigest()}{'.png' if len(frames) == 1 else '.webp'}"
        self._write(name, partial(_encode, frames))
        return name

    def save_png(self, content: bytes) -> str:
        """Write a file as an environment returned it; return its name."""
        name = f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.png"
        self._write(name, lambda: content)
        return name

    def _write(self, name: str, encode: Callable[[], bytes]) -> None:
        path = self.folder / name
        if not path.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            draft, content = self.folder / f".draft_{os.getpid()}_{name}", encode()
            draft.write_bytes(content)
            self.written += len(content)
            os.replace(draft, path)


def _frames(video: Any) -> "list[Image]":
    from PIL import Image

    count = len(video)
    chosen = sorted({round(place * (count - 1) / max(FRAMES - 1, 1)) for place in range(FRAMES)}) if count else []
    return [Image.fromarray(video[place].permute(1, 2, 0).contiguous().numpy()) for place in chosen]


def _encode(frames: "list[Image]") -> bytes:
    content = io.BytesIO()  # a picture that is saved to a path is written there in pieces, at twice the time
    if len(frames) == 1:
        frames[0].save(content, format="PNG", compress_level=1)
    elif frames:
        options: dict[str, Any] = {"save_all": True, "duration": FRAME_MILLISECONDS, "loop": 0, "method": 0}
        frames[0].save(content, format="WEBP", append_images=frames[1:], **options)
    return content.getvalue()


def to_generations(groups: Sequence[Group], split: Literal["train", "val"]) -> list[Generation]:
    return [
        Generation(
            split=split,
            id=group.prompt.id,
            sample=place,
            prompt=group.prompt.text,
            response=one.text,
            ground_truth=group.prompt.ground_truth,
            score=one.score.value,
            parts=dict(one.score.parts),
            extracted=one.score.extracted,
            reason=one.score.reason or group.truth_problem or "",
            failure=f"{one.score.error.cause}: {one.score.error.message}" if one.score.error else None,
            reward=one.reward,
            tokens=one.completion.sampled_length,
            finish_reason=one.completion.finish_reason,
            pictures=len(group.prompt.images),
        )
        for group in groups
        for place, one in enumerate(group.responses)
    ]
