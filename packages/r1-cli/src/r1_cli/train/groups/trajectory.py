"""What an episode leaves: all tokens behind its prompt, which of them the policy chose, and its turns."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from r1_core.types import Sample
from r1_data.types import Message, Prompt
from r1_rewards.types import Failure, RewardInput, Score
from r1_rollout.types import Completion

if TYPE_CHECKING:
    from PIL.Image import Image

StopReason = Literal[
    "answered",  # a turn without a tool call
    "done",  # the environment said so
    "max_turns",
    "max_tokens",  # data.max_response_length
    "turn_tokens",  # a turn was cut, and nothing can answer half a turn
    "malformed_calls",
    "failed",  # the environment
    "timeout",  # episode_timeout
    "forked",  # of a fork: a later path of the episode goes on from another prompt
]
CUT: frozenset[StopReason] = frozenset({"max_turns", "max_tokens", "turn_tokens", "timeout"})


Input = TypeVar("Input", bound=RewardInput)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that was executed, or refused with `error`."""

    tool: str
    arguments: Mapping[str, object]
    seconds: float = 0.0
    error: str = ""
    truncated: int = 0  # characters left out of its result
    cause: str = ""  # of the error, as `r1_rewards.types.Failure` has it, or malformed, limit


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens [begin, end) behind the prompt, from one speaker."""

    role: Literal["assistant", "environment"]
    begin: int
    end: int
    messages: tuple[Message, ...] = ()  # OpenAI style; pictures as {"type": "image"}, in the order of `images`
    calls: tuple[Call, ...] = ()  # of an environment's turn: what it executed
    reward: float = 0.0  # that the environment gave for an assistant's turn
    state: int = 0  # hash of the state that an assistant's turn saw (GiGPO, arXiv 2505.10978)
    finish_reason: Literal["stop", "length"] = "stop"  # of an assistant's turn


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Trajectory(Completion):
    """An episode in the form of a completion: `token_ids` and `logprobs` cover everything behind the prompt.

    Log-probs are 0 on tokens of the environment. `finish_reason` is "length" if a limit ended the episode.

    An episode whose policy does not always see the exact tokens of its past has several paths: `forks`, and last the
    main path, which carries them and whose score is the episode's. A sampled turn is trained in one path only; where it
    stands in another, it is context.
    """

    sampled: NDArray[np.bool_]  # [response_length], tokens that the policy chose
    turns: tuple[Turn, ...]
    position_ids: Tensor  # int64 [axes, prompt_length + response_length]
    later_inputs: Mapping[str, Tensor]  # forward arguments of the environment's pictures
    images: "tuple[Image, ...]"  # the environment's pictures, decoded and resized
    stop_reason: StopReason
    score: Score | None  # the environment's own, if it has one
    failure: Failure | None  # of the environment
    text: str  # everything behind the prompt, decoded
    prompt: Prompt | None  # what the tokens follow; None: the group's prompt
    forks: "tuple[Trajectory, ...]"  # the other paths, in the order of their turns

    def __init__(
        self,
        token_ids: Sequence[int] | NDArray[np.int32],
        logprobs: Sequence[float] | NDArray[np.float32],
        sampled: Sequence[bool] | NDArray[np.bool_],
        turns: Sequence[Turn],
        position_ids: Tensor,
        stop_reason: StopReason,
        weight_version: int,
        *,
        later_inputs: Mapping[str, Tensor] | None = None,
        images: "Sequence[Image]" = (),
        score: Score | None = None,
        failure: Failure | None = None,
        text: str = "",
        prompt: Prompt | None = None,
        forks: "Sequence[Trajectory]" = (),
        routed_experts: NDArray[Any] | None = None,
    ) -> None:
        """Raises ValueError if there is not one log-prob and one mark for each token."""
        # `super()` without arguments does not work in a dataclass with slots.
        finish_reason: Literal["length", "stop"] = "length" if stop_reason in CUT else "stop"
        Completion.__init__(self, token_ids, logprobs, finish_reason, weight_version, routed_experts)
        marks = np.asarray(sampled, np.bool_)
        if marks.shape != self.token_ids.shape:
            raise ValueError(f"an episode of {len(self.token_ids)} tokens has marks of shape {marks.shape}")
        values = {
            "sampled": marks,
            "turns": tuple(turns),
            "position_ids": position_ids,
            "later_inputs": later_inputs or {},
            "images": tuple(images),
            "stop_reason": stop_reason,
            "score": score,
            "failure": failure,
            "text": text,
            "prompt": prompt,
            "forks": tuple(forks),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def paths(self) -> "tuple[Trajectory, ...]":
        """All paths in the order of their turns: the forks, and last the main path, which is `self`."""
        return (*self.forks, self)

    @property
    def sampled_length(self) -> int:
        return sum(int(path.sampled.sum()) for path in self.paths)

    @property
    def messages(self) -> list[Message]:
        """The conversation behind the messages of the main path's prompt."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def calls(self) -> list[Call]:
        return [call for path in self.paths for turn in path.turns for call in turn.calls]

    @property
    def assistant_turns(self) -> list[Turn]:
        """The policy's turns that are trained in this path, which is all but those that stand in it as context."""
        own = (turn for turn in self.turns if turn.role == "assistant")
        return [turn for turn in own if self.sampled[turn.begin : turn.end].any()]

    videos: ClassVar[tuple[Tensor, ...]] = ()  # environments return none

    def reward_input(self, plain: Input) -> Input:
        """Return what a verifier gets: the last turn as the response, and the conversation before it."""
        last = max(index for index, turn in enumerate(self.turns) if turn.role == "assistant")
        before = [message for turn in self.turns[:last] for message in turn.messages]
        start: Input | Prompt = self.prompt or plain
        return replace(
            plain,
            response=str(self.turns[last].messages[0]["content"]),
            response_length=self.sampled_length,
            messages=[*start.messages, *before],
            images=[*start.images, *self.images],
        )

    @property
    def has_turn_rewards(self) -> bool:
        return any(turn.reward for path in self.paths for turn in path.turns)

    @property
    def turn_rewards(self) -> float:
        """The sum of what the environment gave for single turns."""
        return sum(turn.reward for path in self.paths for turn in path.assistant_turns)

    def to_samples(self, prompt: Prompt, group_id: int, reward: float, episode_id: int = 0) -> list[Sample]:
        """Return one sample per path, in the order of `paths`: the loss covers sampled tokens only.

        Args:
            prompt: of the group, for paths without one of their own.
            reward: of the whole episode; what turns have of it stands on their last tokens.
            episode_id: that the samples share if there are several.
        """
        samples, turns, rest = list[Sample](), 0, reward - self.turn_rewards
        for path in self.paths:
            samples.append(path._to_sample(path.prompt or prompt, group_id, rest, turns))
            turns += len(path.assistant_turns)
        return [replace(sample, episode_id=episode_id) for sample in samples] if self.forks else samples

    def _to_sample(self, prompt: Prompt, group_id: int, reward: float, first_turn: int) -> Sample:
        start, marks = len(prompt.token_ids), torch.from_numpy(self.sampled)
        nothing = torch.zeros(start)
        turn_ids, rewards, states = self._per_token(start, first_turn)
        return Sample(
            token_ids=torch.cat([torch.tensor(prompt.token_ids), torch.from_numpy(self.token_ids).long()]),
            loss_mask=torch.cat([nothing.bool(), marks]),
            position_ids=self.position_ids,
            group_id=group_id,
            reward=reward,
            model_inputs=prompt.model_inputs,
            later_inputs=self.later_inputs,
            prompt_length=start,
            rollout_logprobs=torch.cat([nothing, torch.from_numpy(self.logprobs)]),
            turn_ids=turn_ids,
            token_rewards=rewards,
            state_ids=states,
            routed_experts=None if self.routed_experts is None else torch.from_numpy(self.routed_experts),
        )

    def _per_token(self, start: int, first_turn: int) -> tuple[Tensor, Tensor, Tensor]:
        length = start + len(self.token_ids)
        turn_ids = torch.full([length], -1, dtype=torch.int32)
        rewards, states = torch.zeros(length), torch.zeros(length, dtype=torch.int64)
        marks = torch.cat([torch.zeros(start, dtype=torch.bool), torch.from_numpy(self.sampled)])
        for number, turn in enumerate(self.assistant_turns, first_turn):
            own = slice(start + turn.begin, start + turn.end)
            turn_ids[own], states[own] = number, turn.state
            rewards[start + turn.end - 1] = turn.reward
        return turn_ids.masked_fill(~marks, -1), rewards, states * marks


def describe_turns(episode: Trajectory) -> list[dict[str, Any]]:
    """Return the turns in the form of the record; pictures are in its column `media`."""
    return [
        {
            "role": turn.role,
            "begin": turn.begin,
            "end": turn.end,
            "messages": json.dumps(turn.messages),
            "calls": [asdict(call) | {"arguments": json.dumps(dict(call.arguments))} for call in turn.calls],
            "reward": turn.reward,
        }
        for turn in episode.turns
    ]


def without_pictures(message: Message) -> Message:
    """Return the message with pictures as {"type": "image"}, so that JSON can hold it."""
    content = message["content"]
    if isinstance(content, str):
        return message
    return {**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in content]}
