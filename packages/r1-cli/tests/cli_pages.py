"""Runs as `r1 view` finds them: a log, a record of samples, pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HOSTILE = "<img src=x onerror=\"document.title='broken'\"><script>document.title='broken'</script>"
PICTURE = "0123456789abcdef0123456789abcdef.png"


def write_log(run: Path, steps: int, offset: float = 0.0) -> None:
    run.mkdir(parents=True, exist_ok=True)
    rows = [{"step": s, "reward/overall": offset + 1 - 1 / s, "actor/grad_norm": 2.0 / s} for s in range(1, steps + 1)]
    (run / "experiment_log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


LATER = "fedcba9876543210fedcba9876543210.png"  # returned by a tool
MESSAGES: list[list[dict[str, Any]]] = [
    [{"role": "assistant", "content": f"I look. {HOSTILE}"}],
    [{"role": "tool", "content": [{"type": "text", "text": "Here it is:"}, {"type": "image"}]}],
    [{"role": "assistant", "content": "It is 4."}],
    [{"role": "user", "content": "nobody reads this"}],
]


def turn(role: str, begin: int, end: int, messages: object, calls: object = (), reward: float = 0.0) -> dict[str, Any]:
    return {
        "role": role, "begin": begin, "end": end, "messages": json.dumps(messages), "calls": calls, "reward": reward
    }  # fmt: skip


def call(tool: str = "look", error: str = "", arguments: str = '{"x0": 0.5}') -> dict[str, Any]:
    return {
        "tool": tool,
        "arguments": arguments,
        "seconds": 0.25,
        "error": error,
        "truncated": 0,
        "cause": "exception" if error else "",
    }


def write_episodes(run: Path, step: int = 1) -> Path:
    """Write a run whose answers are episodes: a turn, a tool's picture and a failed call, a turn, an unread answer."""
    from PIL import Image

    from r1_cli.runs.schema import SCHEMA

    write_log(run, 1)
    write_samples(run, step)
    path = run / "samples" / f"{step:09}-train.parquet"
    table = pq.read_table(path, partitioning=None)
    first, tool, second, last = MESSAGES
    turns = [
        turn("assistant", 0, 4, first, reward=0.5),
        turn("environment", 4, 8, tool, [call(), call(error="no such part")]),
        turn("assistant", 8, 10, second),
        turn("environment", 10, 10, last),
    ]
    for name, values in {
        "turns": [turns] * len(table), "stop_reason": ["done"] * len(table),
        "media": [[PICTURE, LATER]] * len(table),
    }.items():  # fmt: skip
        column = pa.array(values, SCHEMA.field(name).type)
        table = table.append_column(name, column) if name not in table.column_names else table.set_column(
            table.column_names.index(name), name, column)  # fmt: skip
    pq.write_table(table, path)
    (run / "media").mkdir()
    for name, colour in ((PICTURE, "teal"), (LATER, "red")):
        Image.new("RGB", (64, 48), colour).save(run / "media" / name)
    return run


def write_samples(run: Path, step: int, groups: int = 3, each: int = 4, phase: str = "train") -> None:
    """Write a step of the record. Group 0 has no variance, its first answer failed; the last of each is cut off."""
    count = groups * each
    group, sample = np.repeat(np.arange(groups), each), np.tile(np.arange(each), groups)
    tokens = [list(range(10 + one % 5)) for one in range(count)]
    noise = [[0.1 * (t - 5) for t in row] for row in tokens]
    columns: dict[str, Any] = {
        "step": pa.array([step] * count, pa.int32()),
        "phase": [phase] * count,
        "group": pa.array(group, pa.int32()),
        "sample": pa.array(sample, pa.int32()),
        "prompt_id": [f"rows.jsonl:{one}" for one in group],
        "prompt": [f"What is {one} plus {one}? {HOSTILE}" for one in group],
        "answer": [f"It is {one}, says {number}. {HOSTILE}" for number, one in enumerate(group)],
        "ground_truth": [str(one) for one in group],
        "media": [[PICTURE] for _ in group],
        "tokens": pa.array(tokens, pa.list_(pa.int32())),
        "rollout_logprobs": pa.array(noise, pa.list_(pa.float32())),
        "old_logprobs": pa.array(noise, pa.list_(pa.float32())),
        "entropies": pa.array(noise, pa.list_(pa.float32())),
        "advantages": pa.array(noise, pa.list_(pa.float32())),
        "score": np.where(group == 0, 0.0, np.where((group == 2) & (sample == 1), np.nan, sample)),
        "reward": [float(one) for one in sample],
        "parts": pa.array([[("accuracy", 1.0), (HOSTILE, 0.5)]] * count, pa.map_(pa.string(), pa.float64())),
        "extracted": [str(one) for one in group],
        "reason": [""] * count,
        "failure": ["timeout: 3 s" if number == 0 else None for number in range(count)],
        "finish_reason": ["length" if one == each - 1 else "stop" for one in sample],
        "weight_version": pa.array([step] * count, pa.int32()),
    }  # fmt: skip
    (run / "samples").mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), run / "samples" / f"{step:09}-{phase}.parquet", compression="zstd")


def write_tokenizer(run: Path) -> None:
    """Write a checkpoint's tokenizer, whose token 3 is a script and 4 an end of line."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {f"word{number} ": number for number in range(14) if number not in (3, 4)} | {HOSTILE: 3, "\n": 4, "?": 14}
    folder = run / "global_step_2" / "actor"
    folder.mkdir(parents=True)
    Tokenizer(WordLevel(words, unk_token="?")).save(str(folder / "tokenizer.json"))


def write_run(run: Path, steps: int = 3, offset: float = 0.0) -> Path:
    from PIL import Image

    write_log(run, steps, offset)
    for step in range(1, steps + 1):
        write_samples(run, step)
    (run / "media").mkdir()
    Image.new("RGB", (64, 48), "teal").save(run / "media" / PICTURE)
    return run
