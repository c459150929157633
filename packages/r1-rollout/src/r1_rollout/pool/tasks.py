"""What a call gives the members of a pool to do, and what it gets back."""

from dataclasses import dataclass

from r1_rollout.errors import EngineError
from r1_rollout.types import Completion, PromptLike, SamplingParams

FinishedPart = tuple[int, int | None, list[Completion]]  # also the number of a sample, None for a whole group
Outcome = list[Completion] | BaseException


class MemberLost(EngineError):
    """The process of a member has died."""


@dataclass(slots=True)
class Backlog:
    """The unfinished work of a member, its load measure."""

    tokens: int = 0  # of prompts, and of answers at full length that have not arrived yet
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Task:
    """A group to sample, as a member gets it."""

    index: int  # of the prompt, or of the request in its session
    prompt: PromptLike
    params: SamplingParams
    split: bool = False  # its samples are reported one by one
