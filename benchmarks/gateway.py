"""Episodes of agents that sample over HTTP, compared with the same turns without the gateway.

uv run python benchmarks/gateway.py [--prompts 8] [--samples 4] [--turns 4] [--rounds 5]
uv run python benchmarks/gateway.py --hidden 512 --layers 8

The model of tool_loop.py writes the same turn of `--thought` + 4 tokens whatever it is asked, so that all sides sample
the same tokens:

- `gateway`: each episode is an agent in a process of its own, which sends its conversation with `http.client`, once a
  turn, over one connection; r1 answers with `AgentPlayer`: HTTP, JSON, matching of messages, rendering, sampling;
- `environment`: an environment in a process gives the answers that the agents give; r1 plays the episodes with
  `EpisodePlayer`. Turns begin one by one, as the agents' do;
- `direct`: the prompts of all these turns are known, and a session gets an episode's next one when the turn before is
  sampled. Nothing is rendered, parsed or sent, and the turns of all episodes begin at the same moment, so that the
  engine fills prompts in fewer batches and decodes more rows at a time;
- `single turns`: as many answers of the same length to the rows' prompts alone, with as many rows at a time.

The sides take turns in this process, each round in another order, with one thread and float32 on a processor. Reported
are seconds, and processor seconds, which other work on the machine changes less: of this process, its user time alone,
of the engine within it, and of the agents and environments, which have processes of their own. A ratio is the median of
the rounds' ratios, with the least and the largest. The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tool_loop import LONGEST, Task, timed

from r1_cli.gateway.server import GatewayServer
from r1_cli.train.episodes.agent_events import RequestQueue, live_agents
from r1_cli.train.episodes.agents import AgentPlayer, Player
from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer
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
import time
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
    return {"overall": 1.0, "processor": time.process_time()}
"""


ENVIRONMENT = """\
import time


class Talk:
    def reset(self, row):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        return None if self.turns == TURNS else "Go on."

    def score(self):
        return {"overall": 1.0, "processor": time.process_time()}
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


Work = tuple[int, int, float]  # turns and tokens of the policy, and seconds without a request to the engine


@dataclass(frozen=True)
class Figures:
    """Of one side in one round."""

    work: tuple[int, int]  # turns and tokens of the policy
    seconds: float
    processor: float  # seconds of this process
    user: float  # the same without the kernel's
    engine: float  # those within the engine
    players: float  # of the processes of agents or environments


class Sides:
    def __init__(self, task: Task, options: argparse.Namespace, folder: str, stack: ExitStack) -> None:
        agent, environment = Path(folder, "agent.py"), Path(folder, "environment.py")
        agent.write_text(AGENT.replace("TURNS", str(options.turns)))
        environment.write_text(ENVIRONMENT.replace("TURNS", str(options.turns)))
        agents, talks = (
            stack.enter_context(EnvironmentPool(setup, workers=options.workers))
            for setup in (
                EnvironmentSetup(agent=f"{agent}:solve", episode_timeout=600.0),
                EnvironmentSetup(environment=f"{environment}:Talk"),
            )
        )
        queue = RequestQueue()
        server = GatewayServer(queue.answer, reward=queue.reward)
        stack.callback(server.close)
        renderer = Renderer(task.tokenizer)
        turns = TurnRenderer(renderer, probe_template(renderer, end_token_ids=[task.end]))
        limits = EpisodeLimits(max_tokens=LONGEST, max_turns=options.turns)
        ends = frozenset({task.end})
        self._agents = AgentPlayer(
            agents, live_agents(agents, server, queue), turns, task.tokenizer, ends, limits, max_prompt_tokens=LONGEST
        )
        self._talks = EpisodePlayer(talks, turns, task.tokenizer, ends, limits)
        examples = [Example(f"row:{n}", question, (), "") for n, question in enumerate(task.questions)]
        self._prompts = [renderer.render(example) for example in examples]
        self._params = SamplingParams(max_tokens=LONGEST, n=task.samples, seed=1)
        self.engine = CountedEngine(copy.deepcopy(task.model), end_token_ids={task.end}, tokenizer=task.tokenizer)
        self._weights = LocalWeights(task.model.state_dict().items(), version=1)
        self._episodes: list[list[tuple[Prompt, int]]] = []  # the prompt and the tokens of each turn
        self._players = 0.0  # processor seconds of the agents or environments that played last

    def gateway(self) -> Work:
        return self._play(self._agents)

    def environment(self) -> Work:
        return self._play(self._talks)

    def _play(self, player: Player) -> Work:
        """Play all episodes; return turns and tokens of the policy, and seconds without a request to the engine."""
        with self.engine.active(self._weights):
            groups = dict(player.generate(self.engine, self._prompts, self._params))
        played = [
            (self._prompts[index], sample, episode)
            for index, group in sorted(groups.items())
            for sample, episode in enumerate(group)
            if isinstance(episode, Trajectory) and not episode.forks and episode.failure is None
        ]
        self._episodes = [turns_of(*one) for one in played]
        self._players = sum(episode.score.parts["processor"] for _, _, episode in played if episode.score is not None)
        return (*self._count(), player.use.metrics()["timing_s/tools"])

    def direct(self) -> Work:
        """Sample the turns of the episodes that were played last."""
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
        self._players = 0.0
        return (*self._count(), 0.0)

    def single_turns(self) -> Work:
        lengths: list[int] = []
        with self.engine.active(self._weights):
            session = self.engine.open_session(self._params)
            for _ in self._episodes[0]:
                waiting = {prompt.id for prompt in self._prompts}
                for prompt in self._prompts:
                    session.submit(prompt.id, prompt, max_tokens=LONGEST, n=self._params.n)
                while waiting:
                    for key, answers in session.poll():
                        waiting.remove(str(key))
                        lengths += [len(one.token_ids) for one in answers]
            session.close()
        self._players = 0.0
        return len(lengths), sum(lengths), 0.0

    def _count(self) -> tuple[int, int]:
        lengths = [length for episode in self._episodes for _, length in episode]
        return len(lengths), sum(lengths)

    def measure(self, number: int) -> dict[str, Figures]:
        """Return the figures of each side in round `number`, whose order depends on it."""
        sides: list[Callable[[], Work]] = [self.gateway, self.environment, self.direct, self.single_turns]
        found: dict[str, Figures] = {}
        for side in sides[number % 4 :] + sides[: number % 4]:
            self.engine.seconds, user = 0.0, resource.getrusage(resource.RUSAGE_SELF).ru_utime
            timing = timed(side)
            user = resource.getrusage(resource.RUSAGE_SELF).ru_utime - user
            found[side.__name__] = Figures(
                timing.work, timing.seconds, timing.processor_seconds, user, self.engine.seconds, self._players
            )
        return found


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
        rounds = [sides.measure(number) for number in range(options.rounds + 1)][1:]  # the first warms up
    expected = options.prompts * options.samples * options.turns
    for one in rounds:
        if any(figures.work != (expected, expected * (options.thought + 4)) for figures in one.values()):
            raise SystemExit(f"{[figures.work for figures in one.values()]} turns and tokens instead of {expected}")
    kinds: dict[str, Callable[[Figures], float]] = {
        "seconds": lambda one: one.seconds,
        "processor seconds": lambda one: one.processor,
        "user seconds": lambda one: one.user,
        "processor seconds in the engine": lambda one: one.engine,
        "processor seconds beside the engine": lambda one: one.processor - one.engine,
        "processor seconds of agents and environments": lambda one: one.players,
    }
    work = dict(zip(("turns", "tokens"), rounds[0]["direct"].work, strict=True))
    return work | {name: summarize(rounds, kind, expected) for name, kind in kinds.items()}


def summarize(rounds: list[dict[str, Figures]], kind: Callable[[Figures], float], requests: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"{side}, ms a request": spread([1000 * kind(one[side]) / requests for one in rounds]) for side in rounds[0]
    }
    for side, other in (("gateway", "environment"), ("gateway", "direct"), ("environment", "single_turns")):
        if all(kind(one[other]) for one in rounds):
            found[f"{side} to {other}"] = spread([kind(one[side]) / kind(one[other]) for one in rounds])
    return found


def spread(values: list[float]) -> list[float]:
    """Return the median, the least and the largest."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4, help="episodes to each prompt")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--thought", type=int, default=60, help="words in a turn")
    parser.add_argument("--hidden", type=int, default=128, help="dimensions of the model")
    parser.add_argument("--layers", type=int, default=3, help="of the model")
    parser.add_argument("--rounds", type=int, default=5, help="that count, behind one to warm up")
    parser.add_argument("--workers", type=int, default=4, help="processes that agents are started from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(options.thought, options.prompts, options.samples, hidden=options.hidden, layers=options.layers)
        print(json.dumps(compare(task, options, folder)))


if __name__ == "__main__":
    main()
