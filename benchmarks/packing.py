"""How much of what the ranks pay for is useful when a step is cut into micro-batches, beside the ways of others.

uv run python benchmarks/packing.py [--runs 5]

Two kinds of lengths: like GSM8K's (prompts of 60 to 250 tokens, answers around 200), and long-tailed ones (log-normal
with sigma 1, every fiftieth as long as allowed, 4096). Each is cut for budgets of 4k to 32k tokens, 256 to 2048
samples and 1, 2 and 8 ranks. Per cut:

useful     tokens of the samples / tokens paid for: all ranks wait for the slowest of each round, padding counts
filled     tokens / budget, over all rounds but the last, which holds what is left
rounds     against the least that arithmetic allows: all tokens / (ranks × budget), rounded up
over       the largest micro-batch / budget: above 1, memory that was not granted

The others, written out below from how they work: `karmarkar_karp` is veRL's and EasyR1's dynamic batching (equally many
samples a rank, then as many bins as the fullest rank's tokens need, without a look at the budget; by r1's own faster
differencing), `first_fit` fills micro-batches for all ranks and deals them out, `padded` is TRL's fixed number of
samples in their own order, as many as fit if all were the longest. `r1_padded` is what r1 does without packing. The
last line is one JSON object.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import product

from r1_core.learner.batching import MicroLimit, balance, split

LONGEST = 4096
BUDGETS, SAMPLES, RANKS = (4096, 8192, 16384, 32768), (256, 512, 1024, 2048), (1, 2, 8)
TIMED = 8192

# One micro-batch of each rank, as indices.
Round = list[list[int]]


def like_gsm8k(count: int, draw: random.Random) -> list[int]:
    """The spreads of the logarithms are those of GSM8K's questions and solutions, counted in characters."""
    prompts = [min(max(round(draw.lognormvariate(math.log(105), 0.38)), 60), 250) for _ in range(count)]
    return [prompt + max(round(draw.lognormvariate(math.log(200), 0.49)), 1) for prompt in prompts]


def long_tailed(count: int, draw: random.Random) -> list[int]:
    free = [min(60 + round(draw.lognormvariate(math.log(500), 1)), LONGEST) for _ in range(count)]
    return [LONGEST if i % 50 == 0 else length for i, length in enumerate(free)]


def r1(lengths: Sequence[int], budget: int, ranks: int) -> list[Round]:
    return deal(split(lengths, MicroLimit(tokens=budget), ranks), ranks)


def r1_padded(lengths: Sequence[int], budget: int, ranks: int) -> list[Round]:
    return deal(split(lengths, MicroLimit(tokens=budget), ranks, padded=True), ranks)


def karmarkar_karp(lengths: Sequence[int], budget: int, ranks: int) -> list[Round]:
    shares = balance(lengths, ranks, equal_size=True)
    bins = max(-(-sum(lengths[i] for i in share) // budget) for share in shares)
    cuts = [[[share[j] for j in part] for part in balance([lengths[i] for i in share], bins)] for share in shares]
    for cut in cuts:
        cut.sort(key=lambda part: -sum(lengths[i] ** 2 for i in part))
    return [list(parts) for parts in zip(*cuts, strict=True)]


def first_fit(lengths: Sequence[int], budget: int, ranks: int) -> list[Round]:
    parts: list[list[int]] = []
    rooms: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        first = next((k for k, room in enumerate(rooms) if room >= lengths[i]), len(parts))
        if first == len(parts):
            parts.append([])
            rooms.append(budget)
        parts[first].append(i)
        rooms[first] -= lengths[i]
    return deal(parts, ranks)


def padded(lengths: Sequence[int], budget: int, ranks: int) -> list[Round]:
    fit = max(budget // max(lengths), 1)
    order = range(len(lengths))
    return deal([list(order[start : start + fit]) for start in range(0, len(order), fit)], ranks)


def deal(parts: list[list[int]], ranks: int) -> list[Round]:
    parts = parts + [[] for _ in range(-len(parts) % ranks)]
    return [parts[start : start + ranks] for start in range(0, len(parts), ranks)]


WAYS: dict[str, Callable[[Sequence[int], int, int], list[Round]]] = {
    "r1": r1,
    "r1_padded": r1_padded,
    "karmarkar_karp": karmarkar_karp,
    "first_fit": first_fit,
    "padded": padded,
}
PADDING = ("r1_padded", "padded")


def judge(rounds: list[Round], lengths: Sequence[int], budget: int, *, pads: bool) -> dict[str, float]:
    ranks, tokens = len(rounds[0]), sum(lengths)
    paid = [[cost(part, lengths, pads=pads) for part in parts] for parts in rounds]
    held = [[cost(part, lengths, pads=False) for part in parts] for parts in rounds[:-1]]
    return {
        "useful": tokens / sum(ranks * max(row) for row in paid),
        "filled": sum(map(sum, held)) / (len(held) * ranks * budget) if held else math.nan,
        "rounds": len(rounds) / -(-tokens // (ranks * budget)),
        "over": max(map(max, paid)) / budget,
    }


def cost(part: list[int], lengths: Sequence[int], *, pads: bool) -> int:
    own = [lengths[i] for i in part]
    return len(own) * max(own, default=0) if pads else sum(own)


def seconds(lengths: Sequence[int], runs: int) -> dict[str, float]:
    """Return the least seconds of each; in turn rather than one after the other, so a slow moment meets them all."""
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(runs):
        for name, way in WAYS.items():
            start = time.perf_counter()
            way(lengths, BUDGETS[0], 8)
            times[name].append(time.perf_counter() - start)
    return {name: min(values) for name, values in times.items()}


def summary(judged: Iterable[dict[str, float]], key: str) -> dict[str, float]:
    values = [row[key] for row in judged if not math.isnan(row[key])]
    return {"mean": sum(values) / len(values), "min": min(values), "max": max(values)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    result: dict[str, object] = {"benchmark": "packing"}
    for kind in (like_gsm8k, long_tailed):
        judged: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
        for count, budget, ranks in product(SAMPLES, BUDGETS, RANKS):
            lengths = kind(count, random.Random(count))
            for name, way in WAYS.items():
                judged[name].append(judge(way(lengths, budget, ranks), lengths, budget, pads=name in PADDING))
        lengths = kind(TIMED, random.Random(0))
        times = seconds(lengths, runs)
        table = {name: {key: summary(rows, key) for key in rows[0]} for name, rows in judged.items()}
        print(
            f"\n{kind.__name__}: {len(judged['r1'])} cuts; {TIMED} samples for 8 ranks with {BUDGETS[0]} tokens timed"
        )
        print(f"{'way':15} useful mean  least  filled least  rounds most  over most        ms")
        for name, row in table.items():
            print(
                f"{name:15} {row['useful']['mean']:11.4f} {row['useful']['min']:6.3f} {row['filled']['min']:13.3f} "
                f"{row['rounds']['max']:12.2f} {row['over']['max']:10.3f} {times[name] * 1000:9.1f}"
            )
        result[kind.__name__] = {
            "useful": {name: row["useful"] for name, row in table.items()},
            "filled_least": {name: row["filled"]["min"] for name, row in table.items()},
            "over_most": {name: row["over"]["max"] for name, row in table.items()},
            "ms": {name: value * 1000 for name, value in times.items()},
            "useful_to_peer": {
                name: table["r1"]["useful"]["mean"] / row["useful"]["mean"]
                for name, row in table.items()
                if name != "r1"
            },
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
