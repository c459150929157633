"""One episode while it is played: its tokens, its turns, and what its limits still allow."""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from r1_cli.train.groups.trajectory import Call, StopReason, Trajectory, Turn, without_pictures
from r1_core.types import join_inputs
from r1_data.positions import append_positions
from r1_data.turns.continuation import Continuation
from r1_data.types import Message, Prompt
from r1_rewards.types import Failure, Score
from r1_rollout.routing import Experts, fill_up, go_on
from r1_rollout.types import Completion


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    max_tokens: int  # that the policy may see behind the row's prompt, the environment's included
    max_turns: int  # of the policy
    max_turn_tokens: int | None = None  # of one turn of the policy; None: what is left
    max_malformed_calls: int = 3  # turns in a row with a call that cannot be executed


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The tokens of one turn of a path."""

    token_ids: list[int]
    engine_token_ids: list[int]
    position_ids: Tensor  # int64 [axes, tokens], in the whole path
    logprobs: np.ndarray  # float32 [tokens], 0 on tokens of the environment
    sampled: np.ndarray  # bool [tokens], those that the path trains


class Path:
    """Turns of which each prompt begins with the exact tokens of the turn before and its prompt.

    It holds each turn's tokens once, and shares them with its copies; `context` puts them together.
    """

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.text = prompt.text  # of the context, as `TurnRenderer.fork` reads it
        self.turns: list[Turn] = []
        self.length = 0  # tokens behind the path's prompt
        self.weight_version = 0
        self._pieces: list[Piece] = []
        self._routed: Experts | None = None  # of the path's prompt and the tokens behind it, up to the latest turn
        self._context: Prompt | None = prompt  # None: to be put together
        self._furthest = _furthest(prompt.position_ids)
        self._later: dict[str, Tensor] = {}  # forward arguments of the environment's pictures
        self._model_inputs = prompt.model_inputs  # of all pictures
        self._images = prompt.images
        self._seen = hashlib.blake2b(np.asarray(prompt.token_ids, np.int32).tobytes(), digest_size=8)

    @property
    def context(self) -> Prompt:
        """What the next turn is sampled from."""
        if self._context is None:
            tokens, engine_tokens = [*self.prompt.token_ids], [*self.prompt.engine_token_ids]
            for piece in self._pieces:
                tokens += piece.token_ids
                engine_tokens += piece.engine_token_ids
            self._context = replace(
                self.prompt,
                token_ids=tokens,
                engine_token_ids=engine_tokens,
                position_ids=self._position_ids(),
                model_inputs=self._model_inputs,
                images=self._images,
            )
        return self._context

    def _position_ids(self) -> Tensor:
        return torch.cat([self.prompt.position_ids, *(piece.position_ids for piece in self._pieces)], dim=1)

    @property
    def token_ids(self) -> list[int]:
        """Tokens behind the path's prompt."""
        return [token for piece in self._pieces for token in piece.token_ids]

    @property
    def last_tokens(self) -> list[int]:
        """Tokens of the latest turn; of the prompt before the first."""
        return self._pieces[-1].token_ids if self._pieces else self.prompt.token_ids

    @property
    def seen(self) -> int:
        """A hash of the context's tokens."""
        return _as_state(self._seen)

    def copy(self) -> "Path":
        """Return a path that goes on from here by itself."""
        other = copy.copy(self)
        other.turns, other._pieces, other._seen = [*self.turns], [*self._pieces], self._seen.copy()
        return other

    def as_context(self, turns: int) -> None:
        """Leave the first `turns` turns of the policy to another path, which trains them."""
        own = [index for index, turn in enumerate(self.turns) if turn.role == "assistant"]
        for index in own[:turns]:
            piece = self._pieces[index]
            self._pieces[index] = replace(
                piece, logprobs=np.zeros_like(piece.logprobs), sampled=np.zeros_like(piece.sampled)
            )

    def add_sampled(self, completion: Completion) -> None:
        tokens = completion.token_ids.tolist()
        if completion.routed_experts is not None:
            self._routed = go_on(self._routed, completion.routed_experts)
        positions = torch.arange(len(tokens)).expand(len(self._furthest), -1)
        self._append(tokens, tokens, positions, completion.logprobs, sampled=True)

    def add_continuation(self, piece: Continuation) -> None:
        tokens, zeros = [*piece.token_ids], np.zeros(len(piece.token_ids), np.float32)
        self._append(tokens, [*piece.engine_token_ids], piece.position_ids, zeros, sampled=False)
        self.text += piece.text
        if piece.model_inputs:
            self._later = join_inputs([self._later, piece.model_inputs])
            self._model_inputs = join_inputs([self.prompt.model_inputs, self._later])
            self._images = [*self._images, *piece.images]

    def _append(
        self,
        tokens: list[int],
        engine_tokens: list[int],
        positions: Tensor,  # counted from 0
        logprobs: np.ndarray,
        *,
        sampled: bool,
    ) -> None:
        moved = append_positions(self._furthest, positions)[:, self._furthest.shape[1] :]
        self._furthest = _furthest(torch.cat([self._furthest, moved], dim=1))
        self._pieces.append(Piece(tokens, engine_tokens, moved, logprobs, np.full(len(tokens), sampled)))
        self._seen.update(np.asarray(tokens, np.int32).tobytes())
        self.length += len(tokens)
        self._context = None

    def trajectory(
        self,
        stop_reason: StopReason,
        text: str,
        *,
        prompt: Prompt | None,
        score: Score | None = None,
        failure: Failure | None = None,
        forks: Sequence[Trajectory] = (),
    ) -> Trajectory:
        """Return the finished path; `text` is everything behind its prompt, decoded. `prompt` is None for a group's."""
        length = len(self.prompt.token_ids) + self.length
        return Trajectory(
            self.token_ids,
            np.concatenate([np.zeros(0, np.float32), *(piece.logprobs for piece in self._pieces)]),
            np.concatenate([np.zeros(0, np.bool_), *(piece.sampled for piece in self._pieces)]),
            self.turns,
            self._position_ids(),
            stop_reason,
            self.weight_version,
            later_inputs=self._later,
            images=self._images[len(self.prompt.images) :],
            score=score,
            failure=failure,
            text=text,
            prompt=prompt,
            forks=forks,
            routed_experts=None if self._routed is None else fill_up(self._routed, length),
        )


class Episode:
    """The paths of an episode: all but the last are forks."""

    def __init__(self, prompt: Prompt, sample: int, limits: EpisodeLimits, index: int = 0, kind: str = "") -> None:
        self.prompt, self.sample, self.index, self._limits = prompt, sample, index, limits
        self.kind = kind  # of what answers, see `EnvironmentPool.kinds`
        self.key = f"{prompt.id}/{sample}"
        self.messages: list[Message] = []  # behind the prompt's, that the policy has seen or said
        self.malformed = 0  # latest turns in a row with a malformed call
        self.stop_reason: StopReason | None = None
        self.score: Score | None = None
        self.failure: Failure | None = None
        self.late = False  # it took longer than `episode_timeout`
        self._paths = [Path(prompt)]
        self._state: str | None = None  # which the next turn sees, in the environment's words

    def begin(self, prompt: Prompt, state: str | None) -> bool:
        """Begin with what the environment said in `reset`; return False, and leave the prompt, if no turn could follow.

        `prompt` has what it said; `state` is its name of the state that the first turn sees.
        """
        if len(prompt.token_ids) - len(self.prompt.token_ids) >= self._limits.max_tokens:
            return False
        self._paths, self._state = [Path(prompt)], state
        return True

    @property
    def first_prompt(self) -> Prompt:
        """The prompt of the first turn."""
        return self._paths[0].prompt

    @property
    def path(self) -> Path:
        """The path that goes on."""
        return self._paths[-1]

    @property
    def context(self) -> Prompt:
        """What the next turn is sampled from."""
        return self.path.context

    @property
    def length(self) -> int:
        """Tokens of the context behind the row's prompt."""
        return len(self.path.prompt.token_ids) + self.path.length - len(self.prompt.token_ids)

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(turn.role == "assistant" for path in self._paths for turn in path.turns)

    @property
    def tokens_allowed(self) -> int:
        """Tokens that the next turn may have."""
        left = self._limits.max_tokens - self.length
        return left if self._limits.max_turn_tokens is None else min(left, self._limits.max_turn_tokens)

    def next_prompt(self) -> Prompt:
        """Return the prompt of the next turn. Its id gives the turn noise of its own."""
        return replace(self.context, id=f"{self.key}/{self.turns}")

    def add_turn(self, completion: Completion, message: Message, text: str = "") -> None:
        """Append a sampled turn; `text` is as `TurnRenderer.decode_turn` returns it."""
        path = self.path
        begin = path.length
        state = path.seen if self._state is None else _hash(self._state.encode("utf-8", "replace"))
        path.add_sampled(completion)
        path.text += text
        path.weight_version = completion.weight_version
        finish = completion.finish_reason
        path.turns.append(Turn("assistant", begin, path.length, (message,), state=state, finish_reason=finish))
        self.messages.append(message)

    def add_outcome(self, reward: float, state: str | None) -> None:
        """Note the latest turn's reward, and what the environment calls the state that the next turn sees."""
        self.path.turns[-1] = replace(self.path.turns[-1], reward=reward)
        self._state = state

    def add_observation(self, piece: Continuation, messages: Sequence[Message], calls: Sequence[Call]) -> bool:
        """Append what the environment answered; return False, and append nothing, if no token could follow it."""
        if self.length + len(piece.token_ids) >= self._limits.max_tokens:
            return False
        path = self.path
        begin = path.length
        path.add_continuation(piece)
        told = tuple(map(without_pictures, messages))
        path.turns.append(Turn("environment", begin, path.length, told, tuple(calls)))
        self.messages += told
        return True

    def fork(self, prompt: Prompt, messages: Sequence[Message], calls: Sequence[Call]) -> bool:
        """Go on from another prompt, which has what the environment answered; False as `add_observation`."""
        if len(prompt.token_ids) - len(self.prompt.token_ids) >= self._limits.max_tokens:
            return False
        self.add_last_answer(messages, calls)
        self.messages += map(without_pictures, messages)
        self._paths.append(Path(prompt))
        return True

    def add_last_answer(self, messages: Sequence[Message], calls: Sequence[Call]) -> None:
        """Note an answer that the policy does not read in this path, which is over."""
        if messages or calls:
            unread = tuple(map(without_pictures, messages))
            self.path.turns.append(Turn("environment", self.path.length, self.path.length, unread, tuple(calls)))

    @property
    def last_tokens(self) -> list[int]:
        return self.path.last_tokens

    def closed(self, end_token_ids: frozenset[int]) -> bool:
        """Whether the policy ended its latest turn with an end token."""
        return self.last_tokens[-1] in end_token_ids

    def copy(self) -> "Episode":
        """Return an episode that goes on from here by itself."""
        other = copy.copy(self)
        other.messages, other._paths = [*self.messages], [path.copy() for path in self._paths]
        return other

    def trajectory(self, decode: Callable[[list[int]], str]) -> Trajectory:
        """Return the finished episode. `decode` gives the text of tokens."""
        assert self.stop_reason is not None, "the episode goes on"
        *forked, main = [path for path in self._paths if path.turns] or self._paths
        forks = [path.trajectory("forked", decode(path.token_ids), prompt=self._own(path)) for path in forked]
        return main.trajectory(
            self.stop_reason,
            decode(main.token_ids),
            prompt=self._own(main),
            score=self.score,
            failure=self.failure,
            forks=forks,
        )

    def _own(self, path: Path) -> Prompt | None:
        return None if path.prompt is self.prompt else path.prompt


def _furthest(position_ids: Tensor) -> Tensor:
    """Return each axis' largest position, [axes, P] -> [axes, 1], or [axes, 0] for no token."""
    return position_ids.amax(1, keepdim=True) if position_ids.shape[1] else position_ids


def _hash(content: bytes) -> int:
    return _as_state(hashlib.blake2b(content, digest_size=8))


def _as_state(digest: "hashlib.blake2b") -> int:
    """Return a number that fits into int64 and is not 0, which stands for no state."""
    return int.from_bytes(digest.digest(), "big", signed=True) or 1
