"""Play episodes: the engine samples turns while environments answer others."""

import logging
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from r1_cli.train.episodes.engine_use import EngineUse
from r1_cli.train.episodes.episode import Episode, EpisodeLimits
from r1_cli.train.episodes.recorded_environments import (
    AnswerSource,
    Environments,
    RecordedEnvironments,
    RecordingEnvironments,
)
from r1_cli.train.groups.trajectory import Call, StopReason, Trajectory
from r1_data.turns.continuation import Continuation
from r1_data.turns.tool_prompt import SourceToolPrompts, ToolPrompt
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import DataError, MediaError, Message, Prompt, json_columns
from r1_rewards.environments.session import digest
from r1_rewards.environments.types import PolicyTurn, StepResult, ToolCall
from r1_rewards.types import Failure, Score
from r1_rollout.errors import EngineError
from r1_rollout.types import Completion, GenerationSession, Interactive, SamplingParams
from r1_rollout.types import Generator as Engine

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Finished = tuple[int, list[Completion]]  # a prompt's index and its trajectories
log = logging.getLogger("r1")
POLL_SECONDS = 0.01  # of the engine's work between two looks at the environments


@dataclass(frozen=True, slots=True)
class EpisodePlayer:
    """Plays episodes with an engine; the counterpart of an engine's `generate` for multi-turn runs.

    A turn's noise depends on (seed, prompt id, sample, turn). With `rounds`, the next turns of all episodes begin
    together, so that tokens do not depend on how long tools take.
    """

    environments: Environments
    renderer: TurnRenderer  # of the kind "", see `EnvironmentPool.kinds`
    tokenizer: "PreTrainedTokenizerBase"
    end_token_ids: frozenset[int]
    limits: EpisodeLimits
    rounds: bool = False
    max_concurrent: int | None = None  # open episodes; None: all
    answers: AnswerSource | None = None  # records what environments answer, or repeats it; None: neither
    use: EngineUse = field(default_factory=EngineUse)
    sources: Mapping[str, str] = field(default_factory=dict)  # the kind of a source; "" for others
    renderers: Mapping[str, TurnRenderer] = field(default_factory=dict)  # of other kinds than ""
    needs_score: set[str] = field(default_factory=set)  # sources without a reward function; empty after the first call

    def tool_prompt(self, source: str) -> ToolPrompt:
        return self.renderers.get(self.sources.get(source, ""), self.renderer).tool_prompt

    @property
    def prepare(self) -> SourceToolPrompts:
        """What shows tools in the prompts of rows."""
        own = {source: self.renderers.get(kind, self.renderer).tool_prompt for source, kind in self.sources.items()}
        return SourceToolPrompts(self.renderer.tool_prompt, own)

    def generate(
        self, engine: Engine, prompts: Sequence[Prompt], params: SamplingParams
    ) -> Generator[Finished, None, None]:
        """Yield (index into `prompts`, its `params.n` episodes) as each group finishes. Raises as `engine.generate`."""
        if not isinstance(engine, Interactive):
            raise EngineError(f"{type(engine).__name__} has no open_session, which episodes of several turns need")
        session, limits = engine.open_session(params), replace(self.limits, max_tokens=params.max_tokens)
        answers = self.answers(self.environments, session, params.seed) if self.answers else None
        with self.use.session(), answers or nullcontext(self.environments) as environments:
            groups: list[tuple[Prompt, list[Completion]]] = []
            play = Play(replace(self, environments=environments, limits=limits), session, prompts, params.n)
            try:
                for index, episodes in play:
                    if isinstance(environments, RecordingEnvironments):
                        environments.version = episodes[0].weight_version
                    groups.append((prompts[index], episodes))
                    yield index, episodes
                self.use.add_tokens(session, groups)
            finally:
                play.close()
                self._warn_of_missing_rewards(groups)

    def _warn_of_missing_rewards(self, groups: Sequence[tuple[Prompt, list[Completion]]]) -> None:
        unjudged: dict[str, list[Trajectory]] = {}  # by kind
        for prompt, episodes in groups if self.needs_score else ():
            kind = self.sources.get(prompt.source, "")
            if prompt.source in self.needs_score and not self.environments.kinds[kind].scores:
                ended = [one for one in episodes if isinstance(one, Trajectory) and one.failure is None]
                unjudged.setdefault(kind, []).extend(ended)
        for kind, found in unjudged.items():
            if found and not any(one.has_turn_rewards for one in found):
                log.warning(
                    "%s gave no reward in the first %d episodes, whose scores are all 0: it has no score(), and "
                    "worker.reward.reward_function is missing",
                    self.environments.kinds[kind].setup.name, len(found),
                )  # fmt: skip
        if groups:
            self.needs_score.clear()


@dataclass(slots=True)
class Play:
    """One call: prompts that wait, episodes that are open, groups that are finished."""

    player: EpisodePlayer
    session: GenerationSession
    prompts: Sequence[Prompt]
    n: int
    _waiting: deque[int] = field(init=False)  # prompts that have not begun
    _episodes: dict[str, Episode] = field(default_factory=dict)  # open, by key
    _groups: dict[int, dict[int, Trajectory | None]] = field(default_factory=dict)  # None: open
    _ready: list[Episode] = field(default_factory=list)  # whose next turn may be sampled
    _sampling: dict[str, list[Episode]] = field(default_factory=dict)  # by the key of their request
    _resetting: dict[int, list[Episode]] = field(default_factory=dict)  # groups that wait for `reset`, by index
    _prompts: dict[int, dict[str, Prompt]] = field(default_factory=dict)  # that `reset` changed, by group and digest
    _starting: set[str] = field(default_factory=set)  # episodes whose environment is being reset
    _held: dict[str, PolicyTurn] = field(default_factory=dict)  # turns that wait for that
    _answering: set[str] = field(default_factory=set)  # episodes whose environment takes a step or computes its score
    _finished: deque[Finished] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._waiting = deque(range(len(self.prompts)))

    def __iter__(self) -> Iterator[Finished]:
        while self._waiting or self._episodes:
            self._begin()
            self._submit()
            self._receive()
            while self._finished:
                yield self._finished.popleft()

    def close(self) -> None:
        self.session.close()
        for key in self._episodes:
            self.player.environments.cancel(key)

    # --- the engine ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Open the groups that there is room for. With rounds, only between two of them."""
        if self.player.rounds and self._pending:
            return
        most = self.player.max_concurrent
        while self._waiting and (not self._episodes or most is None or len(self._episodes) + self.n <= most):
            index = self._waiting.popleft()
            prompt = self.prompts[index]
            kind = self.player.sources.get(prompt.source, "")
            episodes = [Episode(prompt, sample, self.player.limits, index, kind) for sample in range(self.n)]
            self._groups[index] = dict.fromkeys(range(self.n))
            for episode in episodes:
                self._episodes[episode.key] = episode
                self._starting.add(episode.key)
                self.player.environments.start(episode.key, environment_row(prompt), prompt.images, kind=kind)
            if self.player.environments.kinds[kind].setup.environment:  # what it says in `reset` belongs to the prompt
                self._resetting[index] = episodes
            else:
                self._submit_first(episodes)

    def _submit_first(self, episodes: list[Episode]) -> None:
        """Sample the first turns of a group. If they share one prompt, it is computed once.

        Without rounds none of them waits for the others.
        """
        first, *others = (episode.context for episode in episodes)
        if any(other is not first for other in others):
            self._ready += episodes
            return
        split = not self.player.rounds
        self._sampling |= {one.key: [one] for one in episodes} if split else {first.id: episodes}
        length, stop = episodes[0].tokens_allowed, self._renderer(episodes[0]).stop_strings
        self.session.submit(first.id, first, n=self.n, max_tokens=length, stop=stop, split=split)

    def _submit(self) -> None:
        if self.player.rounds:
            if self._pending:
                return
            self._ready.sort(key=lambda episode: (episode.index, episode.sample))
        for index, episodes in list(self._resetting.items()):
            if self._starting.isdisjoint(episode.key for episode in episodes):
                self._submit_first(self._resetting.pop(index))
        for episode in self._ready:
            prompt, stop = episode.next_prompt(), self._renderer(episode).stop_strings
            self._sampling[prompt.id] = [episode]
            self.session.submit(prompt.id, prompt, max_tokens=episode.tokens_allowed, stop=stop)
        self._ready.clear()

    @property
    def _pending(self) -> bool:
        return bool(self._sampling or self._starting or self._answering)

    def _receive(self) -> None:
        """Wait until the engine or an environment has something."""
        waiting = bool(self._starting or self._answering)
        # Recorded answers come between two certain steps of the engine.
        seconds = 0.0 if isinstance(self.player.environments, RecordedEnvironments) else POLL_SECONDS
        if self._sampling:
            with self.player.use.polling():
                finished = self.session.poll(seconds if waiting else None)
            for key, completions in finished:
                for episode, completion in zip(self._sampling.pop(key), completions, strict=True):
                    self._take_turn(episode, completion)
        if waiting:
            idle = not (self._sampling or self._ready)
            with self.player.use.waiting() if idle else nullcontext():
                answers = self.player.environments.poll(None if idle else 0.0)
            for key, answer in answers:
                self._take_answer(self._episodes[key], answer)

    # --- turns and answers --------------------------------------------------------------------------------------------

    def _take_turn(self, episode: Episode, completion: Completion) -> None:
        player, tokens = self.player, completion.token_ids.tolist()
        text = player.tokenizer.decode(tokens, skip_special_tokens=True)
        renderer = self._renderer(episode)
        whole = renderer.decode_turn(tokens)
        episode.add_turn(completion, {"role": "assistant", "content": text}, whole)
        cut = completion.finish_reason == "length"
        if episode.failure or episode.late:
            return self._stop(episode, "failed" if episode.failure else "timeout")
        if not player.environments.kinds[episode.kind].tools:
            return self._step(episode, PolicyTurn(text, cut=cut))
        if cut:  # half a turn has no whole call, and is no answer
            return self._stop(episode, "turn_tokens" if episode.length < player.limits.max_tokens else "max_tokens")
        calls = renderer.parse_calls(whole, episode.prompt.metadata)
        if not calls:
            return self._stop(episode, "answered")
        episode.malformed = episode.malformed + 1 if any(call.error for call in calls) else 0
        if episode.malformed >= player.limits.max_malformed_calls:
            return self._stop(episode, "malformed_calls")
        if episode.turns >= player.limits.max_turns:
            return self._stop(episode, "max_turns")
        made = tuple(ToolCall(call.name, call.arguments, call.id, call.error) for call in calls)
        return self._step(episode, PolicyTurn(text, made))

    def _step(self, episode: Episode, turn: PolicyTurn) -> None:
        if episode.key in self._starting:
            self._held[episode.key] = turn
        else:
            self._answering.add(episode.key)
            self.player.environments.step(episode.key, turn)

    def _take_answer(self, episode: Episode, answer: StepResult | Score | Failure) -> None:
        started, key = episode.key in self._starting, episode.key
        self._starting.discard(key)
        self._answering.discard(key)
        if isinstance(answer, Score):
            episode.score = answer
            self._close(episode)
        elif isinstance(answer, Failure):
            self._take_failure(episode, answer)
        elif not started:
            self._take_observation(episode, answer)
        elif key in self._held:
            self._step(episode, self._held.pop(key))
        else:
            self._take_reset(episode, answer)

    def _take_reset(self, episode: Episode, answer: StepResult) -> None:
        """Add what `reset` returned to the prompt. What cannot be added fails the episode."""
        if not answer.messages:
            return
        prompts, said = self._prompts.setdefault(episode.index, {}), digest(repr(answer.messages))
        try:
            if said not in prompts:  # the episodes of a group share a prompt if they are told the same
                prompts[said] = self._renderer(episode).extend_prompt(episode.prompt, answer.messages)
            prompt = prompts[said]
        except DataError as error:  # a picture or a text that the template does not write
            episode.failure = Failure("wrong_shape", f"reset() returned what cannot be in a prompt: {error}")
            return
        if not episode.begin(prompt, answer.state):
            added = len(prompt.token_ids) - len(episode.prompt.token_ids)
            message = f"reset() adds {added} tokens to the prompt, which leave no room in data.max_response_length"
            episode.failure = Failure("wrong_shape", message)

    def _take_observation(self, episode: Episode, answer: StepResult) -> None:
        limits = self.player.limits
        calls = [
            Call(one.name, one.arguments, one.seconds, one.error, one.truncated, one.cause) for one in answer.calls
        ]
        episode.add_outcome(answer.reward, answer.state)
        if answer.done or episode.turns >= limits.max_turns or episode.tokens_allowed < 1:
            episode.add_last_answer(answer.messages, calls)
            reason: StopReason = "max_turns" if episode.turns >= limits.max_turns else "max_tokens"
            return self._stop(episode, "done" if answer.done else reason)
        piece = self._continue(episode, answer.messages)
        forked = self._fork(episode, piece)
        if forked is None:
            goes_on = episode.add_observation(piece, piece.messages, calls)
        else:
            goes_on = episode.fork(forked, piece.messages, calls)
        if not goes_on:
            episode.add_last_answer(piece.messages, calls)
            return self._stop(episode, "max_tokens")
        self._ready.append(episode)

    def _continue(self, episode: Episode, messages: Sequence[Message]) -> Continuation:
        """Render what an environment answered. A picture that cannot be used becomes an error text."""
        renderer, tokens = self._renderer(episode), episode.last_tokens
        closed = episode.closed(self.player.end_token_ids)
        try:
            return renderer.continuation(tokens, messages, closed=closed)
        except MediaError as error:
            told = [{**message, "content": f"error: {error}"} for message in messages]
            return renderer.continuation(tokens, told, closed=closed)

    def _fork(self, episode: Episode, piece: Continuation) -> Prompt | None:
        """Return the prompt of a new path, None where the policy goes on from the tokens that it has seen."""
        messages = [*episode.messages, *piece.messages]
        images = [*episode.context.images, *piece.images]
        return self._renderer(episode).fork(episode.first_prompt, messages, episode.path.text + piece.text, images)

    def _take_failure(self, episode: Episode, failure: Failure) -> None:
        """End an episode whose environment failed, whatever it waits for.

        One that took too long is judged by what it has, unless only its environment could judge it.
        """
        late = failure.cause == "timeout" and not self.player.environments.kinds[episode.kind].scores
        episode.late = late
        if not late:
            episode.failure = failure
        if episode.stop_reason is not None:  # its own score failed
            return self._close(episode)
        self._held.pop(episode.key, None)
        self._ready = [one for one in self._ready if one is not episode]
        if not episode.turns:
            return None  # its first turn is being sampled with its group's: it stops when that arrives
        request = episode.next_prompt().id
        if self._sampling.pop(request, None):
            self.session.cancel(request)
        return self._stop(episode, "timeout" if late else "failed")

    def _renderer(self, episode: Episode) -> TurnRenderer:
        return self.player.renderers.get(episode.kind, self.player.renderer)

    def _stop(self, episode: Episode, reason: StopReason) -> None:
        episode.stop_reason = reason
        environments = self.player.environments
        if environments.kinds[episode.kind].scores and episode.failure is None:
            self._answering.add(episode.key)
            environments.finish(episode.key)
        else:
            environments.cancel(episode.key)
            self._close(episode)

    def _close(self, episode: Episode) -> None:
        group = self._groups[episode.index]
        decode = self.player.tokenizer.decode
        group[episode.sample] = episode.trajectory(lambda tokens: str(decode(tokens, skip_special_tokens=True)))
        del self._episodes[episode.key]
        done: list[Completion] = [trajectory for trajectory in group.values() if trajectory is not None]
        if len(done) == self.n:
            del self._groups[episode.index]
            self._prompts.pop(episode.index, None)
            self._finished.append((episode.index, done))


def environment_row(prompt: Prompt) -> dict[str, object]:
    """Return the row that `reset` gets: the columns that JSON can hold, and the ground truth as `answer`."""
    row = {"answer": prompt.ground_truth, "ground_truth": prompt.ground_truth, **json_columns(prompt.metadata)}
    return row
