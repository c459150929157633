"""One agent's episode: the conversations that it holds with the policy, with their exact tokens."""

import json
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from r1_cli.gateway.conversations import Forest, PathNode, message_key, reply_keys, request_key, tools_key
from r1_cli.gateway.messages import ChatCall, ChatReply, ChatRequest, GatewayError
from r1_cli.train.episodes.episode import Episode, EpisodeLimits
from r1_cli.train.groups.trajectory import Call, StopReason, Trajectory
from r1_data.turns.turn_renderer import TurnRenderer
from r1_data.types import DataError, JsonObject, MediaError, Message, Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWERS = ("tool", "user")  # roles of messages that may follow a turn; with others the conversation is rendered whole
MOST_RENDERERS = 64  # for the tools of different requests
MOST_OPENINGS = 64  # whose prompts are kept


class Renderers:
    """Renders requests: one `TurnRenderer` for each set of tools."""

    def __init__(
        self, turns: TurnRenderer, tokenizer: "PreTrainedTokenizerBase", end_token_ids: frozenset[int]
    ) -> None:
        self.turns, self.tokenizer, self.end_token_ids = turns, tokenizer, end_token_ids
        self._by_tools: dict[str, TurnRenderer] = {tools_key(()): turns}
        self._openings: dict[tuple[str, ...], tuple[Sequence[Message], Prompt]] = {}

    def of(self, key: str, tools: Sequence[JsonObject]) -> TurnRenderer:
        """Return the renderer for tools with this key.

        Raises DataError if the chat template cannot write calls of tools.
        """
        if key not in self._by_tools:
            if len(self._by_tools) >= MOST_RENDERERS:
                self._by_tools = {tools_key(()): self.turns}
            self._by_tools[key] = self.turns.with_tools(tools)
        return self._by_tools[key]

    def render(self, turns: TurnRenderer, key: tuple[str, ...], id_: str, messages: Sequence[Message]) -> Prompt:
        """Render messages whole. Those with which all agents of a group begin are rendered once.

        `key` is that of the tools, and those of the messages.
        """
        if any(message["role"] == "assistant" for message in messages):
            return turns.render(id_, messages)
        known, prompt = self._openings.get(key, ((), None))
        if prompt is None or known != messages:  # keys leave out names and ids, which a template may write
            if len(self._openings) >= MOST_OPENINGS:
                self._openings.clear()
            prompt = turns.render(id_, messages)
            self._openings[key] = messages, prompt
        return prompt

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


@dataclass(eq=False, slots=True)
class SampledTurn:
    """A request, and the turn that answers it."""

    start: Episode | None  # the tokens before the turn; None when it is sampled, as they are many
    turns: TurnRenderer
    stop: tuple[str, ...]  # strings of the request
    max_tokens: int
    opening: str  # key of the system message that begins its conversation; "" without one
    episode: Episode | None = None  # with the turn's tokens; None while it is in flight
    reply: ChatReply | None = None
    waiting: list["Future[ChatReply]"] = field(default_factory=list)


Turn = PathNode[SampledTurn]


class AgentEpisode:
    """Answers an agent's requests, and keeps what was sampled as the paths of one episode."""

    def __init__(
        self, prompt: Prompt, sample: int, index: int, limits: EpisodeLimits, max_context: int, renderers: Renderers
    ) -> None:
        """`max_context` limits the tokens of a path, its prompt included; `index` is of the prompt in its batch."""
        self.prompt, self.sample, self.index = prompt, sample, index
        self.key = f"{prompt.id}/{sample}"
        self.reward: float | None = None  # that the agent sent
        self.exhausted: StopReason | None = None  # the limit that refused the latest request
        self.counts: Counter[str] = Counter()  # of requests: "further" ones, and "forked" among them
        self._limits, self._max_context, self._renderers = limits, max_context, renderers
        self._forest: Forest[SampledTurn] = Forest()
        self._asked: dict[str, Turn] = {}

    def ask(self, request: ChatRequest, future: "Future[ChatReply]") -> Turn | None:
        """Return the turn to sample for a request; None if it is a retry, which gets the same reply.

        Raises GatewayError: the request cannot be rendered, or a limit allows no further turn.
        """
        tools, keys = tools_key(request.tools), [message_key(message) for message in request.messages]
        key = request_key(request, tools, keys)
        if (known := self._asked.get(key)) is None:
            known = self._asked[key] = self._begin(request, tools, keys)
            known.state.waiting.append(future)
            return known
        if known.state.reply is None:
            known.state.waiting.append(future)
        else:
            future.set_result(known.state.reply)
        return None

    def request_of(self, turn: Turn) -> Prompt:
        """Return what a turn is sampled from. Its id gives the turn noise of its own."""
        assert turn.state.start is not None
        return replace(turn.state.start.context, id=f"{self.key}/{turn.number}")

    def take(self, turn: Turn, completion: Completion) -> None:
        """Add a sampled turn to its path, and answer those who wait for it."""
        state, tokens = turn.state, completion.token_ids.tolist()
        raw = self._renderers.decode(tokens)
        assert state.start is not None
        prompt_tokens = len(state.start.context.token_ids)
        state.episode, state.start = state.start.copy(), None
        state.episode.add_turn(completion, {"role": "assistant", "content": raw})
        text, calls = raw, list[ChatCall]()
        if completion.finish_reason == "stop":  # half a turn has no whole call
            text, parsed = state.turns.split_calls(state.turns.decode_turn(tokens))
            calls = [
                ChatCall(f"call{turn.number % 1000:03d}{index % 100:02d}", call.name, json.dumps(call.arguments))
                for index, call in enumerate(parsed)
            ]
        shown, stop = _cut_at(text, state.stop)
        turn.replies = reply_keys(
            {text, shown, shown + stop}, [(call.name, json.loads(call.arguments)) for call in calls], raw
        )
        state.reply = ChatReply(
            id=uuid.uuid4().hex,
            text=shown,
            calls=tuple(calls),
            finish_reason="length" if completion.finish_reason == "length" else "tool_calls" if calls else "stop",
            prompt_tokens=prompt_tokens,
            completion_tokens=len(tokens),
            token_ids=tuple(tokens),
            logprobs=tuple(completion.logprobs.tolist()),
        )
        for future in state.waiting:
            if not future.cancelled():
                future.set_result(state.reply)
        state.waiting.clear()

    def drop(self, turn: Turn, error: GatewayError) -> None:
        """Forget a turn that was not sampled, so that its request may be sent again."""
        self._forest.remove(turn)
        self._asked = {key: other for key, other in self._asked.items() if other is not turn}
        for future in turn.state.waiting:
            if not future.cancelled():
                future.set_exception(error)

    def stand_in(self) -> Turn:
        """Return a turn of one token, for an agent that ended without one."""
        start = Episode(self.prompt, self.sample, self._limits, self.index)
        return self._forest.add(None, "", (), SampledTurn(start, self._renderers.turns, (), 1, ""))

    @property
    def unsampled(self) -> list[Turn]:
        return [turn for turn in self._forest.nodes if turn.state.episode is None]

    @property
    def is_empty(self) -> bool:
        return not self._forest.nodes

    def trajectory(self, reason: StopReason, score: Score | None, failure: Failure | None) -> Trajectory:
        """Return the finished episode: the main path, and as its forks the others that nothing goes on from.

        The main path is the one with the latest turn, among those whose system message is the first request's. It
        trains all its turns; another path trains those that no path before it has.
        """
        first, leaves = self._forest.nodes[0], self._forest.leaves
        main = max((leaf for leaf in leaves if leaf.state.opening == first.state.opening), key=lambda leaf: leaf.number)
        trained = {turn.number for turn in main.path}
        forks: list[Trajectory] = []
        for leaf in leaves:
            if leaf is not main:
                own = [turn.number for turn in leaf.path]
                forks.append(self._finish(leaf, "forked", context=sum(map(trained.__contains__, own))))
                trained.update(own)
        return self._finish(main, self._reason_of(main) if reason == "done" else reason, score, failure, forks)

    # --- parts --------------------------------------------------------------------------------------------------------

    def _begin(self, request: ChatRequest, tools: str, keys: Sequence[str]) -> Turn:
        if len(self._forest.nodes) >= self._limits.max_turns:
            raise self._exhaust("max_turns", f"the episode has had its {self._limits.max_turns} turns")
        parent, covered = self._forest.find(tools, keys)
        if any(message["role"] not in ANSWERS for message in request.messages[covered:]):
            parent, covered = None, 0
        try:
            turns = self._renderers.of(tools, request.tools)
            twin = self._forest.find_twin(parent, tools, keys[covered:])
            if twin is not None and twin.state.start is not None:
                start = twin.state.start
            elif parent is None:
                start = self._start(self._renderers.render(turns, (tools, *keys), self.prompt.id, request.messages))
            else:
                start = self._go_on(turns, parent, request.messages[covered:])
        except (DataError, MediaError) as error:
            raise GatewayError(400, str(error), "messages") from error
        self._count(parent)
        allowed = min(start.tokens_allowed, request.max_tokens or start.tokens_allowed)
        opening = keys[0] if request.messages[0]["role"] == "system" else ""
        self.exhausted = None
        state = SampledTurn(start, turns, request.stop, allowed, opening)
        return self._forest.add(parent, tools, keys[covered:], state)

    def _count(self, parent: Turn | None) -> None:
        if self._forest.nodes:
            self.counts["further"] += 1
            self.counts["forked"] += int(parent is None or bool(parent.children))

    def _start(self, prompt: Prompt) -> Episode:
        left = self._max_context - len(prompt.token_ids)
        if left < 1:
            message = f"the messages have {len(prompt.token_ids):,} tokens, and a path at most {self._max_context:,}"
            raise self._exhaust("max_tokens", f"{message} (data.max_prompt_length and max_response_length)")
        row = self.prompt
        prompt = replace(prompt, id=row.id, ground_truth=row.ground_truth, metadata=row.metadata, source=row.source)
        limits = replace(self._limits, max_tokens=min(left, self._limits.max_tokens))
        return Episode(row if _is_same(prompt, row) else prompt, self.sample, limits, self.index)

    def _go_on(self, turns: TurnRenderer, parent: Turn, messages: Sequence[Message]) -> Episode:
        before, reply = parent.state.episode, parent.state.reply
        assert before is not None
        assert reply is not None
        episode = before.copy()
        piece = turns.continuation(episode.last_tokens, messages, closed=episode.closed(self._renderers.end_token_ids))
        answered = any(message["role"] == "tool" for message in messages)
        calls = [Call(call.name, json.loads(call.arguments)) for call in reply.calls] if answered else []
        if not episode.add_observation(piece, piece.messages, calls):
            message = "the messages leave no token for a turn: data.max_response_length is"
            raise self._exhaust("max_tokens", f"{message} {self._limits.max_tokens:,}")
        return episode

    def _exhaust(self, reason: StopReason, message: str) -> GatewayError:
        self.exhausted = reason
        return GatewayError(400, message, "messages")

    def _reason_of(self, leaf: Turn) -> StopReason:
        """Return why a path ended that its agent gave up by itself."""
        state = leaf.state
        assert state.episode is not None
        if state.reply is None or state.reply.finish_reason != "length":
            return "done"
        return "max_tokens" if state.episode.tokens_allowed < 1 else "turn_tokens"

    def _finish(
        self,
        leaf: Turn,
        reason: StopReason,
        score: Score | None = None,
        failure: Failure | None = None,
        forks: Sequence[Trajectory] = (),
        *,
        context: int = 0,
    ) -> Trajectory:
        assert leaf.state.episode is not None
        path = leaf.state.episode.path.copy()
        path.as_context(context)
        text, own = self._renderers.decode(path.token_ids), None if path.prompt is self.prompt else path.prompt
        return path.trajectory(reason, text, prompt=own, score=score, failure=failure, forks=forks)


def _cut_at(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return the text before the first of some strings, and that string; "" if there is none."""
    found = [(place, stop) for stop in stops if (place := text.find(stop)) >= 0]
    if not found:
        return text, ""
    place, stop = min(found)
    return text[:place], stop


def _is_same(one: Prompt, other: Prompt) -> bool:
    return (
        one.token_ids == other.token_ids
        and not other.videos
        and [image.tobytes() for image in one.images] == [image.tobytes() for image in other.images]
    )
