"""Play episodes of agents: programs that sample from the policy over HTTP, as from any server."""

import base64
import io
import logging
from collections import Counter, deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from r1_cli.gateway.messages import ChatReply, ChatRequest, GatewayError
from r1_cli.train.episodes.agent_episode import AgentEpisode, Renderers, Turn
from r1_cli.train.episodes.agent_events import (
    OVER,
    Agents,
    AgentSource,
    Ended,
    Event,
    Requested,
    Rewarded,
    Sampled,
)
from r1_cli.train.episodes.engine_use import EngineUse
from r1_cli.train.episodes.episode import EpisodeLimits
from r1_cli.train.episodes.player import EpisodePlayer, Finished, environment_row
from r1_cli.train.episodes.recorded_environments import RecordedEnvironments
from r1_cli.train.groups.trajectory import StopReason, Trajectory
from r1_data.turns.tool_prompt import ToolPrompt
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import Message, Prompt
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import StepResult
from r1_rewards.types import Failure, Score
from r1_rollout.errors import EngineError, PromptError
from r1_rollout.types import Completion, Interactive, SamplingParams
from r1_rollout.types import Generator as Engine

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

MOST_AGENTS = 256  # open at a time, if the configuration does not say
FEW = 8  # requests, after which a warning of forks is due

log = logging.getLogger("r1")


@dataclass(slots=True)
class AgentPlayer:
    """Plays episodes of agents with an engine; the counterpart of `EpisodePlayer`.

    A turn's noise depends on (seed, prompt id, sample, the number of its request in the episode).
    """

    environments: EnvironmentPool | RecordedEnvironments
    agents: AgentSource  # runs the agents of a call, or repeats recorded ones
    renderer: TurnRenderer  # without tools: requests have their own
    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: frozenset[int]
    limits: EpisodeLimits
    max_prompt_tokens: int  # with `limits.max_tokens` behind it, a path is as long as it may be
    max_concurrent: int | None = None  # open episodes; None: MOST_AGENTS
    needs_score: frozenset[str] = frozenset()  # sources without a reward function
    rounds: ClassVar[bool] = False
    renderers: ClassVar[Mapping[str, TurnRenderer]] = MappingProxyType({})
    counts: Counter[str] = field(default_factory=Counter)  # of requests, see `AgentEpisode.counts`
    warned: bool = False
    use: EngineUse = field(default_factory=EngineUse)

    @property
    def prepare(self) -> ToolPrompt:
        """What shows tools in the prompts of rows: an agent's requests have them."""
        return self.renderer.tool_prompt

    def tool_prompt(self, source: str) -> ToolPrompt:
        return self.renderer.tool_prompt

    def generate(
        self, engine: Engine, prompts: Sequence[Prompt], params: SamplingParams
    ) -> Generator[Finished, None, None]:
        """Yield (index into `prompts`, its `params.n` episodes) as each group finishes. Raises as `engine.generate`."""
        if not isinstance(engine, Interactive):
            raise EngineError(f"{type(engine).__name__} has no open_session, which agents need")
        session, groups = engine.open_session(params), list[tuple[Prompt, list[Completion]]]()
        with self.use.session(), self.agents(session, self.use, params.seed) as agents:
            play = AgentPlay(self, agents, prompts, params)
            try:
                for index, episodes in play:
                    groups.append((prompts[index], episodes))
                    yield index, episodes
                self.use.add_tokens(session, groups)
            finally:
                play.close()
                self._warn_of_forks()

    def _warn_of_forks(self) -> None:
        further, forked = self.counts["further"], self.counts["forked"]
        if not self.warned and further >= FEW and 2 * forked > further:
            self.warned = True
            log.warning(
                "%d of %d requests of agents, beside each episode's first, do not go on from the conversation before: "
                "the agent changes its history or its tools, which costs a sample each (metric episode/forks)",
                forked, further,
            )  # fmt: skip


class AgentPlay:
    """One call: prompts that wait, agents that run, and the turns that are sampled for them."""

    def __init__(self, player: AgentPlayer, agents: Agents, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        self.player, self.agents, self.prompts, self.n = player, agents, prompts, params.n
        self._limits = replace(player.limits, max_tokens=params.max_tokens)
        self._renderers = Renderers(player.renderer, player.tokenizer, player.end_token_ids)
        self._waiting = deque(range(len(prompts)))  # prompts that have not begun
        self._episodes: dict[str, AgentEpisode] = {}  # open, by key
        self._groups: dict[int, dict[int, Trajectory | None]] = {}  # None: open
        self._sampling: dict[str, tuple[AgentEpisode, Turn]] = {}  # by the id of their request
        self._endings: dict[str, Failure] = {}  # of agents that ended without a turn
        self._finished: deque[Finished] = deque()

    def __iter__(self) -> Iterator[Finished]:
        while self._waiting or self._episodes:
            self._begin()
            for event in self.agents.poll():
                self._handle(event)
            while self._finished:
                yield self._finished.popleft()

    def close(self) -> None:
        self.agents.close()
        for episode in self._episodes.values():
            self._abandon(episode)

    def _begin(self) -> None:
        """Start the agents of the groups that there is room for."""
        most = self.player.max_concurrent or MOST_AGENTS
        while self._waiting and (not self._episodes or len(self._episodes) + self.n <= most):
            index = self._waiting.popleft()
            prompt = self.prompts[index]
            row = agent_row(prompt)
            self._groups[index] = dict.fromkeys(range(self.n))
            for sample in range(self.n):
                context = self.player.max_prompt_tokens + self._limits.max_tokens
                episode = AgentEpisode(prompt, sample, index, self._limits, context, self._renderers)
                self._episodes[episode.key] = episode
                self.agents.start(episode.key, row, prompt.images)

    # --- events -------------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        match event:
            case Requested():
                self._take_request(self._episodes[event.key], event.request, event.future)
            case Rewarded():
                self._episodes[event.key].reward = event.value
            case Ended():
                self._end(self._episodes[event.key], event.answer)
            case Sampled():
                self._take_turn(*self._sampling.pop(event.request), event.completion)

    def _take_request(self, episode: AgentEpisode, request: ChatRequest, future: "Future[ChatReply]") -> None:
        try:
            turn = episode.ask(request, future)
        except GatewayError as error:
            future.set_exception(error)
            return
        if turn is not None:
            try:
                self._submit(episode, turn)
            except (PromptError, ValueError) as error:
                episode.drop(turn, GatewayError(400, str(error)))

    def _submit(self, episode: AgentEpisode, turn: Turn) -> None:
        prompt, state = episode.request_of(turn), turn.state
        self.agents.submit(prompt, max_tokens=state.max_tokens, stop=(*state.stop, *state.turns.stop_strings))
        self._sampling[prompt.id] = episode, turn

    def _take_turn(self, episode: AgentEpisode, turn: Turn, completion: Completion) -> None:
        episode.take(turn, completion)
        if episode.key in self._endings:
            self._finish(episode, episode.trajectory("failed", None, self._endings.pop(episode.key)))

    def _end(self, episode: AgentEpisode, answer: StepResult | Score | Failure) -> None:
        """End an episode whose agent has ended, or was killed because it took too long."""
        self.agents.stop(episode.key)
        self._abandon(episode)
        score = answer if isinstance(answer, Score) else None
        if score is None and episode.reward is not None:
            score = Score(episode.reward, {"overall": episode.reward})
        failure = answer if isinstance(answer, Failure) else None
        if episode.is_empty:
            missing = Failure("exception", "the agent ended without a request to the policy")
            self._endings[episode.key] = failure or missing
            self._submit(episode, episode.stand_in())
            return
        reason: StopReason = episode.exhausted or "done"
        if failure is not None and failure.cause == "timeout":
            reason, failure = "timeout", None  # it is judged by what it has
        elif episode.exhausted:
            failure = None  # the limit's
        unjudged = score is None and failure is None and self.prompts[episode.index].source in self.player.needs_score
        if unjudged:
            failure = Failure("exception", "the agent gave no reward, and worker.reward.reward_function is missing")
        if failure is not None:
            reason, score = "failed", None
        self._finish(episode, episode.trajectory(reason, score, failure))

    def _abandon(self, episode: AgentEpisode) -> None:
        """Abandon the requests that are being answered."""
        for turn in episode.unsampled:
            request = episode.request_of(turn).id
            self._sampling.pop(request, None)
            self.agents.cancel(request)
            episode.drop(turn, GatewayError(404, OVER))

    def _finish(self, episode: AgentEpisode, trajectory: Trajectory) -> None:
        self.player.counts += episode.counts
        del self._episodes[episode.key]
        group = self._groups[episode.index]
        group[episode.sample] = trajectory
        done: list[Completion] = [one for one in group.values() if one is not None]
        if len(done) == self.n:
            del self._groups[episode.index]
            self._finished.append((episode.index, done))


Player = EpisodePlayer | AgentPlayer


def agent_row(prompt: Prompt) -> dict[str, object]:
    """Return the row that an agent gets: as environments', and `messages` that it may send as they are."""
    pictures = iter(prompt.images)
    return {**environment_row(prompt), "messages": [_with_urls(message, pictures) for message in prompt.messages]}


def _with_urls(message: Message, pictures: "Iterator[Image]") -> Message:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [
        {"type": "image_url", "image_url": {"url": _data_url(next(pictures))}} if part["type"] == "image" else part
        for part in content
    ]
    return {**message, "content": parts}


def _data_url(picture: "Image") -> str:
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
