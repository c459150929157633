"""Episodes of agents that sample over HTTP, compared with the same turns in a plain session of the engine.

uv run python benchmarks/gateway.py [--prompts 8] [--samples 4] [--turns 4] [--rounds 5]

The model of tool_loop.py writes the same turn of `--thought` + 4 tokens whatever it is asked, so that both sides sample
the same tokens:

- `gateway`: each episode is an agent in a process of its own, which sends its conversation with `http.client`, once a
  turn, over one connection; r1 answers with `AgentPlayer`: HTTP, JSON, matching of messages, rendering, sampling;
- `direct`: the prompts of all these turns are known, and a session gets an episode's next one when the turn before is
  sampled. Nothing is rendered, parsed or sent.

Both sides take turns in this process, with one thread and float32 on a processor. Reported are seconds, and the
processor seconds of this process, which other work on the machine changes less; they leave out the agents' own
processes. `ms a request` is the difference of the sides. It has two parts: what is beside the engine, and what the
engine needs more because agents do not begin their turns at the same moment, so that it computes fewer of them at a
time. The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tool_loop import LONGEST, Task, Timing, timed

from r1_cli.gateway.server import GatewayServer
from r1_cli.train.episodes.agents import AgentPlayer, RequestQueue
from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.groups.trajectory import Trajectory
from r1_data import Renderer
from r1_data.turns import TurnRenderer, probe_template
from r1_data.types import Example, Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup
from r1_rollout.embedded.engine import EmbeddedEngine
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

AGENT = """\
import http.client
import json
import urllib.parse


def solve(row, base_url, api_key):
    url = urllib.parse.urlsplit(base_url)
    connection = http.client.HTTPConnection(url.netloc)
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    messages = list(row["messages"])
    for _ in range(TURNS):
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        reply = json.loads(connection.getresponse().read())
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
    return 1.0
"""


class CountedEngine(EmbeddedEngine):
    """Counts the processor seconds that pass within its session's `poll`."""

    seconds = 0.0

    def open_session(self, params: SamplingParams) -> Any:
        session = super().open_session(params)
        poll = session.poll

        def counted(timeout: float | None = None) -> Any:
            begin = time.thread_time()
            try:
                return poll(timeout)
            finally:
                self.seconds += time.thread_time() - begin

        session.poll = counted  # type: ignore[method-assign]
        return session


class Sides:
    def __init__(self, task: Task, options: argparse.Namespace, folder: str, stack: ExitStack) -> None:
        agent = Path(folder, "agent.py")
        agent.write_text(AGENT.replace("TURNS", str(options.turns)))
        setup = EnvironmentSetup(agent=f"{agent}:solve", episode_timeout=600.0)
        pool = stack.enter_context(EnvironmentPool(setup, workers=options.workers))
        queue = RequestQueue()
        server = GatewayServer(queue.answer, reward=queue.reward)
        stack.callback(server.close)
        renderer = Renderer(task.tokenizer)
        turns = TurnRenderer(renderer, probe_template(renderer, end_token_ids=[task.end]))
        limits = EpisodeLimits(max_tokens=LONGEST, max_turns=options.turns)
        ends = frozenset({task.end})
        self._player = AgentPlayer(pool, server, queue, turns, task.tokenizer, ends, limits, max_prompt_tokens=LONGEST)
        examples = [Example(f"row:{n}", question, (), "") for n, question in enumerate(task.questions)]
        self._prompts = [renderer.render(example) for example in examples]
        self._params = SamplingParams(max_tokens=LONGEST, n=task.samples, seed=1)
        self.engine = CountedEngine(copy.deepcopy(task.model), end_token_ids={task.end}, tokenizer=task.tokenizer)
        self._weights = LocalWeights(task.model.state_dict().items(), version=1)
        self._episodes: list[list[tuple[Prompt, int]]] = []  # the prompt and the tokens of each turn

    def gateway(self) -> tuple[int, int]:
        """Play all episodes; return turns and tokens of the policy."""
        with self.engine.active(self._weights):
            groups = dict(self._player.generate(self.engine, self._prompts, self._params))
        self._episodes = [
            turns_of(self._prompts[index], sample, episode)
            for index, group in sorted(groups.items())
            for sample, episode in enumerate(group)
            if isinstance(episode, Trajectory) and not episode.forks and episode.failure is None
        ]
        return self._work()

    def direct(self) -> tuple[int, int]:
        """Sample the turns of the episodes that `gateway` played last."""
        with self.engine.active(self._weights):
            session = self.engine.open_session(self._params)
            waiting = {prompt.id: deque(rest) for (prompt, _), *rest in self._episodes}
            for (prompt, length), *_ in self._episodes:
                session.submit(prompt.id, prompt, max_tokens=length)
            while waiting:
                for key, (completion,) in session.poll():
                    rest = waiting.pop(key)
                    assert completion.finish_reason == "stop"
                    if rest:
                        prompt, length = rest.popleft()
                        waiting[prompt.id] = rest
                        session.submit(prompt.id, prompt, max_tokens=length)
            session.close()
        return self._work()

    def _work(self) -> tuple[int, int]:
        lengths = [length for episode in self._episodes for _, length in episode]
        return len(lengths), sum(lengths)


def turns_of(prompt: Prompt, sample: int, episode: Trajectory) -> list[tuple[Prompt, int]]:
    start, found = episode.prompt or prompt, list[tuple[Prompt, int]]()
    for number, turn in enumerate(episode.assistant_turns):
        tokens = [*start.token_ids, *episode.token_ids[: turn.begin].tolist()]
        positions = episode.position_ids[:, : len(tokens)]
        context = replace(
            start,
            id=f"{prompt.id}/{sample}/{number}",
            token_ids=tokens,
            engine_token_ids=tokens,
            position_ids=positions,
        )
        found.append((context, turn.end - turn.begin))
    return found


def compare(task: Task, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    with ExitStack() as stack:
        sides = Sides(task, options, folder, stack)
        pairs, engine = list[tuple[Timing, Timing]](), list[tuple[float, float]]()
        for number in range(options.rounds + 1):  # the first warms up
            sides.engine.seconds = 0.0
            gateway = timed(sides.gateway)
            between = sides.engine.seconds
            direct = timed(sides.direct)
            if number:
                pairs.append((gateway, direct))
                engine.append((between, sides.engine.seconds - between))
    expected = options.prompts * options.samples * options.turns
    for pair in pairs:
        if any(side.work != (expected, expected * (options.thought + 4)) for side in pair):
            raise SystemExit(f"{[side.work for side in pair]} turns and tokens instead of {expected} turns")
    found: dict[str, Any] = dict(zip(("turns", "tokens"), pairs[0][0].work, strict=True))
    for name in ("seconds", "processor_seconds"):
        both = [[getattr(pair[side], name) for pair in pairs] for side in (0, 1)]
        more = statistics.median(both[0]) - statistics.median(both[1])
        found[name] = {
            "gateway": [round(one, 3) for one in both[0]],
            "direct": [round(one, 3) for one in both[1]],
            "ratio": round(statistics.median(both[0]) / statistics.median(both[1]), 3),
            "ms a request": round(1000 * more / expected, 2),
        }
    shares = [[round(round_[side], 3) for round_ in engine] for side in (0, 1)]
    beside = statistics.median(
        pair[0].processor_seconds - spent for pair, (spent, _) in zip(pairs, engine, strict=True)
    )
    found["engine's processor seconds"] = {"gateway": shares[0], "direct": shares[1]}
    found["processor ms a request beside the engine"] = round(1000 * beside / expected, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="episodes to each prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--thought", type=int, default=60, help="words in a turn")
    parser.add_argument("--rounds", type=int, default=5, help="that count, behind one to warm up")
    parser.add_argument("--workers", type=int, default=4, help="processes that agents are started from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compare(Task(options.thought, options.prompts, options.samples), options, folder)))


if __name__ == "__main__":
    main()
