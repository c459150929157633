"""One episode while it is played: its tokens, its turns, and what its limits still allow."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from r1_cli.train.groups.group import extend_positions
from r1_cli.train.groups.trajectory import Call, StopReason, Trajectory, Turn, without_pictures
from r1_core.types import join_inputs
from r1_data.positions import append_positions
from r1_data.turns.continuation import Continuation
from r1_data.types import Message, Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.types import Completion


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    max_tokens: int  # behind the prompt, the environment's included
    max_turns: int  # of the policy
    max_turn_tokens: int | None = None  # of one turn of the policy; None: what is left
    max_malformed_calls: int = 3  # turns in a row with a call that cannot be executed


class Episode:
    """The prompt of turn k + 1 begins with the exact tokens of turn k's prompt and completion."""

    def __init__(self, prompt: Prompt, sample: int, limits: EpisodeLimits, index: int = 0) -> None:
        self.prompt, self.sample, self.index, self._limits = prompt, sample, index, limits
        self.key = f"{prompt.id}/{sample}"
        self.context = prompt  # what the next turn is sampled from
        self.malformed = 0  # latest turns in a row with a malformed call
        self.stop_reason: StopReason | None = None
        self.score: Score | None = None
        self.failure: Failure | None = None
        self._turns: list[Turn] = []
        self._later: dict[str, Tensor] = {}  # forward arguments of the environment's pictures
        self._logprobs: list[np.ndarray] = []
        self._sampled: list[np.ndarray] = []
        self._weight_version = 0
        self._state: str | None = None  # which the next turn sees, in the environment's words

    @property
    def length(self) -> int:
        """Tokens behind the prompt."""
        return len(self.context.token_ids) - len(self.prompt.token_ids)

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(turn.role == "assistant" for turn in self._turns)

    @property
    def tokens_allowed(self) -> int:
        """Tokens that the next turn may have."""
        left = self._limits.max_tokens - self.length
        return left if self._limits.max_turn_tokens is None else min(left, self._limits.max_turn_tokens)

    def next_prompt(self) -> Prompt:
        """Return the prompt of the next turn. Its id gives the turn noise of its own."""
        return replace(self.context, id=f"{self.key}/{self.turns}")

    def add_turn(self, completion: Completion, message: Message) -> None:
        """Append a sampled turn."""
        begin, tokens = self.length, completion.token_ids.tolist()
        seen = np.asarray(self.context.token_ids, np.int32).tobytes()
        state = _hash(seen if self._state is None else self._state.encode("utf-8", "replace"))
        self._append(tokens, extend_positions(self.context.position_ids, len(tokens)), completion.logprobs, chosen=True)
        self._weight_version = completion.weight_version
        turn = Turn("assistant", begin, self.length, (message,), state=state, finish_reason=completion.finish_reason)
        self._turns.append(turn)

    def add_outcome(self, reward: float, state: str | None) -> None:
        """Note the latest turn's reward, and what the environment calls the state that the next turn sees."""
        self._turns[-1] = replace(self._turns[-1], reward=reward)
        self._state = state

    def add_observation(self, piece: Continuation, messages: Sequence[Message], calls: Sequence[Call]) -> bool:
        """Append what the environment answered; return False, and append nothing, if no token could follow it."""
        if self.length + len(piece.token_ids) >= self._limits.max_tokens:
            return False
        begin = self.length
        positions = append_positions(self.context.position_ids, piece.position_ids)
        zeros = np.zeros(len(piece.token_ids), np.float32)
        self._append(list(piece.token_ids), positions, zeros, chosen=False, engine_tokens=list(piece.engine_token_ids))
        if piece.model_inputs:
            self._later = join_inputs([self._later, piece.model_inputs])
            self.context = replace(
                self.context,
                model_inputs=join_inputs([self.prompt.model_inputs, self._later]),
                images=[*self.context.images, *piece.images],
            )
        self._turns.append(
            Turn("environment", begin, self.length, tuple(map(without_pictures, messages)), tuple(calls))
        )
        return True

    def add_last_answer(self, messages: Sequence[Message], calls: Sequence[Call]) -> None:
        """Note an answer that the policy does not read: the episode is over."""
        if messages or calls:
            unread = tuple(map(without_pictures, messages))
            self._turns.append(Turn("environment", self.length, self.length, unread, tuple(calls)))

    @property
    def last_tokens(self) -> list[int]:
        """Tokens of the latest turn."""
        begin, last = len(self.prompt.token_ids), self._turns[-1]
        return self.context.token_ids[begin + last.begin : begin + last.end]

    def closed(self, end_token_ids: frozenset[int]) -> bool:
        """Whether the policy ended its latest turn with an end token."""
        return self._turns[-1].finish_reason == "stop" and self.context.token_ids[-1] in end_token_ids

    def trajectory(self, text: str) -> Trajectory:
        """Return the finished episode; `text` is everything behind the prompt, decoded."""
        assert self.stop_reason is not None, "the episode goes on"
        start = len(self.prompt.token_ids)
        return Trajectory(
            self.context.token_ids[start:],
            np.concatenate([np.zeros(0, np.float32), *self._logprobs]),
            np.concatenate([np.zeros(0, np.bool_), *self._sampled]),
            self._turns,
            self.context.position_ids,
            self.stop_reason,
            self._weight_version,
            later_inputs=self._later,
            images=self.context.images[len(self.prompt.images) :],
            score=self.score,
            failure=self.failure,
            text=text,
        )

    def _append(
        self,
        tokens: list[int],
        position_ids: Tensor,
        logprobs: np.ndarray,
        *,
        chosen: bool,
        engine_tokens: list[int] | None = None,
    ) -> None:
        self.context = replace(
            self.context,
            token_ids=[*self.context.token_ids, *tokens],
            engine_token_ids=[*self.context.engine_token_ids, *(tokens if engine_tokens is None else engine_tokens)],
            position_ids=position_ids,
        )
        self._logprobs.append(logprobs)
        self._sampled.append(np.full(len(tokens), chosen))


def _hash(content: bytes) -> int:
    """Return a hash that fits into int64 and is not 0, which stands for no state."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True) or 1
