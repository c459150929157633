"""A generation session while tools take their time: how busy the embedded engine is, and how long everything takes.

uv run python benchmarks/session.py [--model tiny|small] [--slots 32] [--tools 0 0.1 2] [--times 1 2 4] [--turns 4]

Random weights in float32. An episode has `--turns` turns of the policy, whose lengths are long-tailed (4 to 96 tokens),
and between them a tool that answers 16 tokens. Tools sleep: each takes `--tools` seconds, all of them at the same time.
There are 1, 2 and 4 times as many episodes as sequences that the engine decodes at once (`--slots`). The ways, which
take turns; the figure is the best of `--repeats`:

- `session`: each episode goes on when its tool has answered;
- `rounds`: all episodes wait for the slowest turn, then for their tools, which run at the same time;
- `serial`: the same, but tools run one after the other; its time is that of `rounds` and the tools' (not slept).

`busy` is the share of the time in which the engine has a request. The tokens that are computed are equal in all ways.
The last line is one JSON object.
"""

import argparse
import heapq
import json
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from rollout_prompts import Prompt, make_model, make_prompts

from r1_rollout import EmbeddedEngine, SamplingParams

TOOL_TOKENS = list(range(10, 26))
LONGEST = 96  # tokens of a turn


@dataclass
class Episode:
    prompt: Prompt
    lengths: list[int]  # tokens of each turn
    turn: int = 0

    @property
    def over(self) -> bool:
        return self.turn == len(self.lengths)

    def extend(self, tokens: list[int]) -> None:
        """Append a turn and its tool's answer to the prompt."""
        ids = [*self.prompt.token_ids, *tokens, *TOOL_TOKENS]
        self.turn += 1
        id = f"{self.prompt.id.split('/')[0]}/{self.turn}"
        self.prompt = replace(self.prompt, id=id, token_ids=ids, position_ids=torch.arange(len(ids))[None])


def make_episodes(model: Any, count: int, turns: int) -> list[Episode]:
    draw = random.Random(1)
    prompts = make_prompts(model, "tiny", count)

    def length() -> int:
        low, high = draw.choices([(4, 24), (24, 48), (48, LONGEST)], [12, 3, 1])[0]
        return draw.randint(low, high)

    return [Episode(prompt, [length() for _ in range(turns)]) for prompt in prompts]


def submit(session: Any, episode: Episode, key: str) -> None:
    session.submit(key, episode.prompt, max_tokens=episode.lengths[episode.turn])


def as_they_come(session: Any, episodes: list[Episode], tool_seconds: float) -> float:
    """Play all episodes; return the seconds in which the engine had a request."""
    answered = [(0.0, number) for number in range(len(episodes))]  # a heap: when each tool has answered
    pending, busy = 0, 0.0
    while answered or pending:
        while answered and answered[0][0] <= time.perf_counter():
            _, number = heapq.heappop(answered)
            submit(session, episodes[number], str(number))
            pending += 1
        start = time.perf_counter()
        left = max(0.0, answered[0][0] - start) if answered else None
        if not pending:
            time.sleep(left or 0.0)
            continue
        finished = session.poll(left)
        now = time.perf_counter()
        busy += now - start
        for key, (completion,) in finished:
            episode = episodes[int(key)]
            episode.extend(completion.token_ids.tolist())
            pending -= 1
            if not episode.over:
                heapq.heappush(answered, (now + tool_seconds, int(key)))
    return busy


def in_rounds(session: Any, episodes: list[Episode], tool_seconds: float) -> float:
    busy = 0.0
    for turn in range(len(episodes[0].lengths)):
        if turn:
            time.sleep(tool_seconds)
        start = time.perf_counter()
        for number, episode in enumerate(episodes):
            submit(session, episode, str(number))
        while finished := session.poll():
            for key, (completion,) in finished:
                episodes[int(key)].extend(completion.token_ids.tolist())
        busy += time.perf_counter() - start
    return busy


def measure(engine: EmbeddedEngine, way: Any, episodes: list[Episode], tool_seconds: float) -> dict[str, float]:
    session = engine.open_session(SamplingParams(max_tokens=LONGEST, seed=1, ignore_eos=True))
    begun = time.perf_counter()
    busy = way(session, episodes, tool_seconds)
    wall = time.perf_counter() - begun
    session.close()
    return {"seconds": wall, "busy": busy / wall}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "small"], default="tiny")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tools", type=float, nargs="+", default=[0.0, 0.1, 2.0])
    parser.add_argument("--times", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    model = make_model(chosen.model)
    engine = EmbeddedEngine(model, end_token_ids=(), max_sequences=chosen.slots, version=0)
    print(" tools  episodes   session   busy    rounds   busy  rounds/session  serial/session")
    rows = []
    for tool_seconds in chosen.tools:
        for times in chosen.times:
            count, best = times * chosen.slots, dict[str, dict[str, float]]()
            for _ in range(chosen.repeats):
                for name, way in (("session", as_they_come), ("rounds", in_rounds)):
                    found = measure(engine, way, make_episodes(model, count, chosen.turns), tool_seconds)
                    best[name] = min(best.get(name, found), found, key=lambda one: one["seconds"])
            session, rounds = best["session"], best["rounds"]
            serial = rounds["seconds"] + (count - 1) * (chosen.turns - 1) * tool_seconds
            ratios = rounds["seconds"] / session["seconds"], serial / session["seconds"]
            print(
                f"{tool_seconds:6g} {count:9} {session['seconds']:8.2f}s {session['busy']:6.2f} "
                f"{rounds['seconds']:8.2f}s {rounds['busy']:6.2f} {ratios[0]:15.2f} {ratios[1]:15.1f}",
                flush=True,
            )
            rows.append({"tool s": tool_seconds, "episodes": count, "slots": chosen.slots, **best, "ratios": ratios})
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
