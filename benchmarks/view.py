"""How long `r1 view` takes to list 100,000 recorded answers: `benchmarks/view.py [--tokens 200] [--files 25 391]`.

Writes records with per-token numbers as a run writes them, then asks a new server, in a new process each, for its first
list: without and with what an earlier server has kept. Then a list by score, a group, and two searches. Wall seconds
and processor seconds of the server's process, without its imports; the files are in the machine's page cache.
The last line is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ANSWERS, EACH = 100_000, 8
WORDS = [
    "the",
    "sum",
    "of",
    "two",
    "numbers",
    "is",
    "found",
    "by",
    "adding",
    "them",
    "so",
    "we",
    "first",
    "compute",
    "and",
    "then",
    "check",
    "each",
    "side",
]
ASKED = {
    "first list": "/api/groups?run=0&down=1",
    "by score": "/api/groups?run=0&sort=score&down=1",
    "a group": "/api/group?run=0&step=3&group=4",
    "by source": "/api/groups?run=0&source=even",
    "search": "/api/groups?run=0&search=says%2099999.",
    "another search": "/api/groups?run=0&search=says%207.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--files", type=int, nargs="*", default=[25, 391])
    parser.add_argument("--ask", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        print(json.dumps(ask(options.ask)))
        return
    found: dict[str, Any] = {}
    for files in options.files:
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            for step in range(1, files + 1):
                write(run, step, ANSWERS // files // EACH, options.tokens)
            for start in ("new", "kept"):
                command = [sys.executable, __file__, "--ask", str(run)]
                environment = {**os.environ, "XDG_CACHE_HOME": str(Path(folder) / "cache")}
                told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
                for name, (wall, processor) in json.loads(told).items():
                    print(f"{files} files, {start}: {name} {wall:.2f} s, processor {processor:.2f} s", flush=True)
                    found[f"{files} files, {start}, {name}"] = [wall, processor]
    print(json.dumps({"benchmark": "view", "load": round(os.getloadavg()[0], 1)} | found))


def ask(run: Path) -> dict[str, tuple[float, float]]:
    """Return wall and processor seconds of each question."""
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
    from starlette.testclient import TestClient

    from r1_cli.runs.view.app import build_app
    from r1_cli.runs.view.guard import LOOPBACK

    found = {}
    with TestClient(build_app([run], None, LOOPBACK), base_url="http://127.0.0.1") as client:
        client.get("/")
        for name, address in ASKED.items():
            wall, processor = time.perf_counter(), time.process_time()
            client.get(address).raise_for_status()
            found[name] = round(time.perf_counter() - wall, 3), round(time.process_time() - processor, 3)
    return found


def write(run: Path, step: int, groups: int, tokens: int) -> None:
    """Write a step of the record: random words, scores and numbers of each token."""
    from r1_cli.runs.schema import SCHEMA, write_table

    rng, count = np.random.default_rng(step), groups * EACH
    group, sample = np.repeat(np.arange(groups), EACH), np.tile(np.arange(EACH), groups)
    score, words = rng.choice([0.0, 0.1, 1.0], count), rng.integers(0, len(WORDS), (count, tokens))
    ends = pa.array(np.arange(count + 1, dtype=np.int32) * tokens)
    numbers = {
        name: pa.ListArray.from_arrays(ends, pa.array(rng.normal(size=count * tokens).astype(np.float32)))
        for name in ("rollout_logprobs", "old_logprobs", "entropies", "advantages")
    }
    prompt = "<|im_start|>user\nA train of {} cars takes on {} people. How many are there?<|im_end|>"
    columns: dict[str, Any] = {
        "step": [step] * count, "phase": ["train"] * count, "group": group, "sample": sample, "score": score,
        "prompt_id": [f"rows.parquet:{(step * groups + one) % 5000}" for one in group], "reward": score,
        "source": ["odd" if one % 2 else "even" for one in group],
        "prompt": [prompt.format(one, one * step) for one in group], "ground_truth": [str(one) for one in group],
        "answer": [" ".join(WORDS[w] for w in row) + f" says {at + step * count}." for at, row in enumerate(words)],
        "tokens": pa.ListArray.from_arrays(ends, pa.array(words.astype(np.int32).ravel())), **numbers,
        "parts": [[("accuracy", float(one))] for one in score], "reason": [""] * count,
        "finish_reason": ["stop"] * count, "weight_version": [step] * count,
    }  # fmt: skip
    arrays = [
        pa.nulls(count, field.type)
        if field.name not in columns
        else column
        if isinstance(column := columns[field.name], pa.Array)
        else pa.array(column, field.type)
        for field in SCHEMA
    ]
    write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), run / "samples" / f"{step:09}-train.parquet")


if __name__ == "__main__":
    main()
