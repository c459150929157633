"""How a run grows from 1 to 64 ranks and engines: what its driver does, starts, stores and writes, with stand-ins.

uv run python benchmarks/scale.py [--counts 1 2 4 8 16 32 64] [--parts step same-step sync requests processes files]

- `step`: a step of `r1_cli.train.loop` of 192 sequences of 4,096 tokens for each rank; `same-step`: one of 1,536 in
  all. The loop, the client of the ranks and its messages are real; ranks answer at once.
- `sync`: the weights of Qwen2.5-7B by name, in buckets of 256 MiB without values, with checksums and probes, through
  the object store and directly. Pool, hosts and weight check are real; learner and engines hold nothing.
- `requests`: 24 groups of 8 answers for each engine, of which each decodes 64 sequences; groups take 3 s in the mean,
  with a long tail. Pool, dispatch and hosts are real; engines wait. All share one process, so processor seconds hold
  the hosts' part, too. Then a session in which no request ends.
- `processes`: Ray and N actors, all real, that import neither torch nor transformers, on this one machine.
- `files`: a checkpoint with the files of Qwen2.5-7B, 1/512 as large, written by the code of each rank in turn, and read
  by that of the last. Nothing is gathered.

A table of each part; `growth` is the exponent of N from 8 on (1: as the number of ranks), and seconds have the N at
which they become 3 % of a step of 60 s, if they go on like this. The last line is one JSON object.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch

COUNTS = [1, 2, 4, 8, 16, 32, 64]
SEQUENCES, TOKENS = 192, 4096  # sequences of a rank
LIMIT = 1.8  # seconds: 3 % of a step of 60 s
LEAST = 8  # ranks from which growth is fitted

Measure = Callable[[int], Mapping[str, float]]


@contextmanager
def open_part(name: str, tokens: int, most: int) -> Iterator[Measure]:
    """Yield what measures a part for a number of ranks, at most `most`."""
    from scale_parts import files, processes, requests, steps, sync

    parts: dict[str, Measure] = {
        "step": lambda count: steps.measure(count, SEQUENCES * count, tokens),
        "same-step": lambda count: steps.measure(count, 8 * SEQUENCES, tokens),
        "sync": lambda count: {**sync.measure(count, direct=False), **sync.measure(count, direct=True)},
        "requests": requests.measure,
        "files": files.measure,
    }
    with processes.open_actors(most) if name == "processes" else nullcontext(parts.get(name)) as measure:
        yield measure


def growth(counts: Sequence[int], values: Sequence[float]) -> float | None:
    """Return the exponent of N by which values grow from `LEAST` on; None if they cannot be fitted."""
    pairs = [(math.log(n), math.log(v)) for n, v in zip(counts, values, strict=True) if n >= LEAST and v > 0]
    if len(pairs) < 2:
        return None
    x, y = (sum(one) / len(pairs) for one in zip(*pairs, strict=True))
    return sum((a - x) * (b - y) for a, b in pairs) / sum((a - x) ** 2 for a, _ in pairs)


def limit(counts: Sequence[int], values: Sequence[float], exponent: float | None) -> str:
    """Return the N at which seconds reach `LIMIT`."""
    if values[-1] >= LIMIT:
        return f"{next(n for n, v in zip(counts, values, strict=True) if v >= LIMIT)}"
    if exponent is None or exponent < 0.05:
        return "none"
    return f"{counts[-1] * (LIMIT / values[-1]) ** (1 / exponent):.3g}"


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:.4g}"


def show(counts: Sequence[int], rows: Sequence[Mapping[str, float]]) -> None:
    print(f"| N | {' | '.join(map(str, counts))} | growth | 3 % at |")
    print("|---" * (len(counts) + 3) + "|")
    for name in rows[0]:
        values = [row[name] for row in rows]
        exponent = growth(counts, values)
        at = limit(counts, values, exponent) if name.endswith("processor s") else ""
        told = "" if exponent is None else f"{exponent:.2f}"
        print(f"| {name} | {' | '.join(map(shown, values))} | {told} | {at} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--parts", nargs="+", default=["step", "same-step", "sync", "requests", "processes", "files"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for name in asked.parts:
        rows = []
        with open_part(name, asked.tokens, max(asked.counts)) as measure:
            for count in asked.counts:
                rows.append({key: float(value) for key, value in measure(count).items()})
                print(name, count, *(f"{key} {value:.4g}" for key, value in rows[-1].items()), sep="  ", flush=True)
        show(asked.counts, rows)
        found[name] = rows
    load = round(os.getloadavg()[0], 1)
    print(json.dumps({"benchmark": "scale", "counts": asked.counts, "load_after": load, "parts": found}))


if __name__ == "__main__":
    main()
