"""Feed damaged input to every reader of what comes from outside: `uv run python tests/fuzz.py --seconds 600`.

Each target gets real inputs that a seeded generator has damaged, as bytes and as values. It may refuse them with the
error that is meant for users; any other exception, a reply of status 500, and an input that takes longer than
`HANG_SECONDS` is a crash. Each is printed once, with the number that repeats it:
`--only rows --seed 0 --number 4711`. Hypothesis is not used: its strategies make valid values, and its examples are
not bounded by time.
"""

import argparse
import asyncio
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
HANG_SECONDS = 20
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", " ", "\0", "é", "\ud800", "{{ 7 }}", "{% for %}", "<image>", "<video>", "../../x", "file:///etc/hostname",
    "data:image/png;base64,AAAA", "1e400", "null", "x" * 5000,
    [], {}, [[]], [None], {"a": {}}, {"role": "user"}, [{"role": "user", "content": None}],
)  # fmt: skip
BYTES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"\x7f\xff\xff\xff",
    b"\n",
    b'"',
    b"{",
    b"]",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"9" * 400,
)

Attempt = Callable[[Random], None]


class Hang(BaseException):
    """An input took longer than `HANG_SECONDS`."""


def damage_bytes(data: bytes, rng: Random) -> bytes:
    """Return the bytes with one to six changes: flipped bits, other or removed or repeated spans, a cut."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        place = rng.randrange(len(found) + 1)
        length = min(rng.choice((1, 1, 2, 4, 16, 200)), len(found) - place)
        match rng.randrange(6):
            case 0 if place < len(found):
                found[place] ^= 1 << rng.randrange(8)
            case 1:
                found[place : place + length] = rng.choice(BYTES)
            case 2:
                del found[place : place + length]
            case 3:
                found[place:place] = found[place : place + length] * rng.choice((1, 1, 2, 50))
            case 4:
                found[place : place + length] = rng.randbytes(length)
            case _ if rng.random() < 0.3:
                del found[place:]
    return bytes(found)


def damage_value(value: Any, rng: Random) -> Any:
    """Return JSON-like values with one to four changed, removed or repeated places."""
    found = json.loads(json.dumps(value, default=str))
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = _places(found)
        if not places:
            return deepcopy(rng.choice(VALUES))
        holder, key = rng.choice(places)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [deepcopy(holder[key]) for _ in range(rng.choice((1, 2, 3)))]
            case 2:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name]))
            case 3 if isinstance(holder[key], str):
                text = damage_bytes(holder[key].encode("utf-8", "surrogatepass"), rng)
                holder[key] = text.decode("utf-8", "surrogateescape")
            case _:
                holder[key] = deepcopy(rng.choice(VALUES))
    return found


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [*((value, key) for key in keys), *(place for key in keys for place in _places(value[key]))]


def fuzz_configuration(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    from r1_cli.config import ConfigError, load_config

    os.chdir(ROOT)
    seeds = [ROOT / "examples/config.yaml", ROOT / "examples/quickstart/config.yaml"]
    texts = [path.read_bytes() for path in seeds]
    trees = [yaml.safe_load(text) for text in texts]
    words = ["trainer.max_steps=3", "worker.rollout.n=4", "+worker.reward.reward_function_kwargs.x=1", "config=a.yaml"]
    file = folder / "fuzzed.yaml"

    def attempt(rng: Random) -> None:
        if rng.random() < 0.4:
            file.write_bytes(damage_bytes(rng.choice(texts), rng))
        else:
            tree = yaml.safe_dump(damage_value(rng.choice(trees), rng), allow_unicode=True)
            file.write_bytes(tree.encode("utf-8", "surrogatepass"))
        more = [damage_bytes(rng.choice(words).encode(), rng).decode("utf-8", "surrogateescape")] * rng.randrange(2)
        load_config([f"config={file}", *more])

    return attempt, (ConfigError,)


ROWS: tuple[dict[str, Any], ...] = (
    {"problem": "How many? <image>", "answer": "3", "images": [{"bytes": None, "path": "a.png"}]},
    {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}, "data_source": "x"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "images": ["a.png"]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"question": "a", "solution": "b", "videos": [{"frames": ["a.png"], "fps": 2}]},
)


def fuzz_rows(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from r1_data.conversations import ConversationReader
    from r1_data.messages import RowReader
    from r1_data.sources import read_rows
    from r1_data.types import DataError

    readers = RowReader(image_dir=str(folder)), ConversationReader(image_dir=str(folder))
    table = pa.Table.from_pylist([ROWS[0]] * 3)
    pq.write_table(table, written := io.BytesIO())
    parquet = written.getvalue()

    def attempt(rng: Random) -> None:
        kind = rng.choice(("jsonl", "jsonl", "json", "parquet", "csv"))
        rows = [damage_value(rng.choice(ROWS), rng) for _ in range(rng.randrange(1, 4))]
        text = json.dumps(rows) if kind == "json" else "\n".join(map(json.dumps, rows))
        content = parquet if kind == "parquet" else b"problem,answer\na,b\n" if kind == "csv" else text.encode()
        path = folder / f"rows{rng.randrange(3)}.{kind}"
        path.write_bytes(damage_bytes(content, rng) if kind in ("parquet", "csv") or rng.random() < 0.4 else content)
        _read_all(read_rows(str(path)), readers, DataError)

    return attempt, (DataError,)


def _read_all(rows: Any, readers: Sequence[Callable[..., Any]], refusal: type[Exception]) -> None:
    for index in range(len(rows)):
        row_id, row = rows[index]
        for read in readers:
            try:
                read(row_id, row)
            except refusal:
                continue


def fuzz_media(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    import torch  # noqa: F401 - now, as importing it takes longer than an input may
    from PIL import Image

    from r1_data.pictures import image_size, load_image
    from r1_data.references import resolve_picture, resolve_video
    from r1_data.types import MediaError
    from r1_data.videos import FrameRules, load_frames, probe_video

    pixels = Image.effect_noise((24, 16), 60).convert("RGB")
    pictures = []
    for kind in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"):
        pixels.save(written := io.BytesIO(), kind)
        pictures.append(written.getvalue())
    films = [_film(kind) for kind in ("mp4", "matroska", "avi")]
    rules, last = FrameRules(max_bytes=2**26), folder / "last"

    def attempt(rng: Random) -> None:
        data = damage_bytes(rng.choice(pictures if rng.random() < 0.6 else films), rng)
        last.write_bytes(data)  # a decoder in C may end the process
        if data[4:8] == b"ftyp" or data[:4] in (b"RIFF", b"\x1a\x45\xdf\xa3") or rng.random() < 0.1:
            video = resolve_video(data, None)
            load_frames(video, probe_video(video, rules))
        else:
            picture = resolve_picture(data, None)
            image_size(picture)
            load_image(picture)

    return attempt, (MediaError,)


def _film(kind: str) -> bytes:
    import av
    from PIL import Image

    with av.open(written := io.BytesIO(), "w", format=kind) as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for shade in range(6):
            frame = av.VideoFrame.from_image(Image.new("RGB", (32, 32), (40 * shade, 0, 0)))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return written.getvalue()


STATE = {
    "step": 2, "cursor": 3, "draws": 3, "pending": [1, 2], "kl_coef": 0.01, "filter": {}, "rewards": {}, "idle": 0,
    "failed": 0, "micro_batches": {}, "val_reward_score": 0.5, "model_only": False,
    "checksums": {"actor/learner.json": 1},
    "files": ["actor/model.safetensors", "actor/learner.json"],
}  # fmt: skip


STATE_NAME = "global_step_2/trainer.json"


def fuzz_checkpoints(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    import torch
    from safetensors.torch import load_file, save

    from r1_cli.build.algorithm import build_start
    from r1_cli.checkpoint.damage import find_damage
    from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
    from r1_cli.config import ConfigError, load_config
    from r1_cli.jobs.resume import load_start
    from r1_cli.plan.start import find_start
    from r1_cli.runs.reader import RunReader

    os.chdir(ROOT)
    weights = save({"a": torch.zeros(3, 2), "b": torch.ones(2)})
    words = ["config=examples/quickstart/config.yaml", f"trainer.save_checkpoint_path={folder / 'run'}"]
    config, _ = load_config(words)
    begin = build_start(config)
    contents: dict[str, Any] = {
        STATE_NAME: STATE,
        "global_step_2/actor/learner.json": {"base": None},
        "global_step_2/actor/model.safetensors.index.json": {"weight_map": {"a": "model.safetensors"}},
        "checkpoint_tracker.json": {"last_global_step": 2, "best_global_step": 2, "best_val_reward_score": 0.5},
        "manifest.json": {"starts": [{"began": "x", "config": {}, "host": {"devices": []}}]},
    }

    class Weights:
        def load(self, path: Path, *, model_only: bool = False) -> None:
            try:
                load_file(path / "model.safetensors")
            except Exception as error:  # as the learner's does
                raise ValueError(str(error)) from error

    def attempt(rng: Random) -> None:
        store = CheckpointStore(folder / "run", limit=2)  # one verifies a checkpoint once
        chosen = rng.choice([*contents, "weights"])
        # One of an older version has no checksums, so what is damaged is read, not refused.
        older = {name: value for name, value in STATE.items() if name != "checksums"}
        for name, content in {**contents, **({STATE_NAME: older} if rng.random() < 0.7 else {})}.items():
            path = store.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            value = damage_value(content, rng) if name == chosen else content
            data = json.dumps(value).encode()
            path.write_bytes(damage_bytes(data, rng) if name == chosen and rng.random() < 0.4 else data)
        model = store.path(2) / "actor/model.safetensors"
        model.write_bytes(damage_bytes(weights, rng) if chosen == "weights" else weights)
        find_damage(store.path(2), contents=rng.random() < 0.5)
        store.best()
        RunReader(store.root).starts()
        start = find_start(config, store)
        if start is not None:
            load_start(Weights(), None, [], start, begin)  # type: ignore[arg-type]

    return attempt, (CheckpointError, ConfigError)


def fuzz_rewards(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    from r1_rewards import Score
    from r1_rewards.services.endpoint import Unusable
    from r1_rewards.services.protocols import PROTOCOLS
    from r1_rewards.services.serve import build_app

    app = build_app(lambda inputs: [Score({"overall": float(bool(one.step))}) for one in inputs])
    requests: list[tuple[str, Any]] = [
        ("/score", {"inputs": [{"response": "\\boxed{2}", "ground_truth": "2", "metadata": {"a": 1}, "step": 1}]}),
        ("/get_reward", {"query": ["1+1=\\boxed{2}"], "prompts": ["1+1="], "labels": ["2"]}),
    ]
    replies: list[tuple[str, Any]] = [
        ("r1", {"scores": [{"parts": {"overall": 1.0, "a": 0}, "reason": "x"}, {"failure": ["timeout", "late"]}]}),
        ("openrlhf", {"rewards": [1.0, 0.5], "accuracy": [1, 0], "errors": [None, "x"]}),
    ]
    loop = asyncio.new_event_loop()

    def attempt(rng: Random) -> None:
        if rng.random() < 0.6:
            name, reply = rng.choice(replies)
            PROTOCOLS[name].decode(damage_value(reply, rng), 2)
        else:
            path, body = rng.choice(requests)
            data = json.dumps(damage_value(body, rng)).encode()
            status = loop.run_until_complete(_post(app, path, damage_bytes(data, rng) if rng.random() < 0.5 else data))
            if status >= 500:
                raise AssertionError(f"{path} answers {status}")

    return attempt, (Unusable,)


async def _post(app: Any, path: str, body: bytes) -> int:
    sent: list[Any] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    more = {"headers": headers, "http_version": "1.1", "scheme": "http", "asgi": {"version": "3.0"}, "root_path": ""}
    await app({**scope, **more, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}, receive, send)
    return int(sent[0]["status"])


def fuzz_gateway(folder: Path) -> tuple[Attempt, tuple[type[BaseException], ...]]:
    from r1_cli.gateway.anthropic_messages import ANTHROPIC_MESSAGES
    from r1_cli.gateway.chat_completions import CHAT_COMPLETIONS
    from r1_cli.gateway.fields import read_body
    from r1_cli.gateway.messages import GatewayError
    from r1_cli.gateway.responses import RESPONSES

    tool = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    requests: list[tuple[Any, Any]] = [
        (CHAT_COMPLETIONS, {
            "model": "p", "max_tokens": 5, "stop": ["a"], "tools": [{"type": "function", "function": tool}],
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": [{"type": "text", "text": "a"}, picture]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
        }),
        (ANTHROPIC_MESSAGES, {
            "model": "p", "max_tokens": 5, "system": "s", "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ],
        }),
        (RESPONSES, {
            "model": "p", "instructions": "s", "tools": [{"type": "function", **tool}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
        }),
    ]  # fmt: skip

    def attempt(rng: Random) -> None:
        dialect, body = rng.choice(requests)
        data = json.dumps(damage_value(body, rng)).encode()
        dialect.read(read_body(damage_bytes(data, rng) if rng.random() < 0.4 else data))

    return attempt, (GatewayError,)


TARGETS = {
    "configuration": fuzz_configuration,
    "rows": fuzz_rows,
    "media": fuzz_media,
    "checkpoints": fuzz_checkpoints,
    "rewards": fuzz_rewards,
    "gateway": fuzz_gateway,
}


@dataclass(slots=True)
class Result:
    """Counts of a target, and its crashes: the first number and the traceback of each place."""

    inputs: int = 0
    seconds: float = 0.0  # of a processor
    refused: int = 0
    crashes: dict[str, tuple[int, str]] = field(default_factory=dict)


@contextmanager
def deadline(seconds: int) -> Any:
    """Raise Hang after so many seconds of this process on a processor, however busy the machine is."""

    def hang(number: int, frame: object) -> None:
        raise Hang(f"took longer than {seconds} s")

    before = signal.signal(signal.SIGPROF, hang)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fuzz(name: str, seconds: float, seed: int = 0, number: int | None = None) -> Result:
    """Feed a target for so many seconds of a processor, or the input of this number once."""
    logging.disable(logging.CRITICAL)
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        attempt, refusals = TARGETS[name](Path(folder))
        result, begin = Result(), time.process_time()
        try:
            while result.seconds < seconds and not (number is not None and result.inputs):
                result.seconds = time.process_time() - begin
                _try(attempt, refusals, result, f"{seed}/{name}/{result.inputs if number is None else number}")
        finally:
            os.chdir(before)
            logging.disable(logging.NOTSET)
    return result


def _try(attempt: Attempt, refusals: tuple[type[BaseException], ...], result: Result, seed: str) -> None:
    try:
        with deadline(HANG_SECONDS):
            attempt(Random(seed))
    except refusals:
        result.refused += 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/r1_" in frame.filename]
        place = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "the target"
        key = f"{type(error).__name__} at {place}"
        result.crashes.setdefault(key, (int(seed.rpartition("/")[2]), "".join(traceback.format_exception(error)[-3:])))
    result.inputs += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of a processor, for each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="this input alone")
    parser.add_argument("--only", choices=TARGETS, nargs="*", default=list(TARGETS))
    options = parser.parse_args()
    failed = False
    for name in options.only:
        result = fuzz(name, options.seconds, options.seed, options.number)
        counts = f"{result.inputs:,} inputs in {result.seconds:.0f} s of a processor, {result.refused:,} refused"
        print(f"{name}: {counts}, {len(result.crashes)} crashes", flush=True)
        for key, (number, shown) in result.crashes.items():
            print(f"  {key}, first at --only {name} --seed {options.seed} --number {number}\n{shown}", flush=True)
        failed |= bool(result.crashes)
    sys.exit(failed)


if __name__ == "__main__":
    main()
