"""Where the time of a run's steps goes, and its gaps: `python benchmarks/timeline.py RUN/timeline.json`.

Reads what `trainer.timeline=N` wrote. A gap is time in which neither an engine samples nor a learner computes.
"""

import json
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

WORK = ("sync", "gen", "old", "ref", "values", "update_critic", "update_actor", "validation")
AROUND = ("step", "wait", "settle")  # spans that others, or other threads, tell more of


def main(path: Path) -> None:
    """Print, of each step, its seconds, the share of them in gaps, and what goes on in those."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    steps = sorted((event for event in events if event["name"].startswith("step ")), key=lambda event: event["ts"])
    worst: dict[str, float] = {}
    for place, step in enumerate(steps):
        shares = gaps(step, [event for event in events if event is not step])
        shown = "  ".join(f"{name} {share:.1%}" for name, share in sorted(shares.items(), key=lambda one: -one[1])[:8])
        print(f"{step['name']:>8}  {step['dur'] / 1e6:7.3f} s  gaps {sum(shares.values()):5.1%}  {shown}")
        for name, share in shares.items() if place else ():  # the first warms up
            worst[name] = max(share, worst.get(name, 0.0))
    print(json.dumps({"largest_gap": max(worst.values(), default=0.0)} | worst))


def gaps(step: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the shares of a step in which nothing of `WORK` goes on in any thread, by what its own thread does."""
    begin, end = step["ts"], step["ts"] + step["dur"]
    inside = [event for event in events if event["ts"] < end and event["ts"] + event["dur"] > begin]
    inside = [event for event in inside if event["name"] not in AROUND and not event["name"].startswith("step ")]
    edges = sorted({begin, end, *(min(max(t, begin), end) for e in inside for t in (e["ts"], e["ts"] + e["dur"]))})
    shares: dict[str, float] = defaultdict(float)
    for left, right in pairwise(edges):
        running = [event for event in inside if event["ts"] <= left and event["ts"] + event["dur"] >= right]
        if any(event["name"] in WORK for event in running):
            continue
        own = [event for event in running if event["tid"] == step["tid"]]
        name = min(own, key=lambda event: event["dur"])["name"] if own else "nothing"
        shares[name] += (right - left) / step["dur"]
    return dict(shares)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
