"""What passes between the policy, an environment and the caller."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

JsonObject: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]  # OpenAI style; content is a str, or parts if there is a picture among them
TruncateSide = Literal["left", "right", "middle"]


class EnvironmentSpecError(ValueError):
    """Tools or an environment that cannot be used as configured."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    id: str = ""
    error: str = ""  # why it cannot be executed, if it was malformed


@dataclass(frozen=True, slots=True)
class PolicyTurn:
    text: str
    calls: tuple[ToolCall, ...] = ()
    cut: bool = False  # by a limit of tokens; none of its calls is executed


@dataclass(frozen=True, slots=True)
class Observation:
    """What a tool or an environment may return instead of bare content.

    `content` is text, a PIL image, OpenAI parts, a mapping, or None. `reward` is of the turn just taken. `done` ends
    the episode. `state` names the state from which the next turn starts; equal states have equal names.
    """

    content: object = None
    reward: float = 0.0
    done: bool = False
    state: str | None = None


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One tool call as it was executed; a step of a gym environment has one with the name "step"."""

    name: str
    arguments: Mapping[str, object]
    seconds: float
    error: str = ""  # the text that the policy got instead of a result
    truncated: int = 0  # characters left out
    replaced: int = 0  # NUL characters and lone surrogates, which became "?"
    cause: str = ""  # of an error: timeout, crash, exception, …; "malformed" if nothing was executed


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to a turn.

    `messages` have the role "tool" (with `tool_call_id` and `name`) or "user". Parts are {"type": "text", "text": str}
    and {"type": "image", "image": bytes of a PNG file}.
    """

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = False
    state: str | None = None
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Actor:
    """What answers the policy, as far as a caller must know it; see `pool.EnvironmentPool`."""

    setup: "EnvironmentSetup"
    tools: list[JsonObject]
    scores: bool


@dataclass(frozen=True, slots=True)
class EnvironmentSetup:
    """What episodes run with: tools, one environment or one agent, and limits.

    A tool is a built-in name ("python", "calculator", "crop", "search"), FILE.py:FUNCTION, or FILE.py for all public
    functions in it. An environment is FILE.py:CLASS, or openenv+ws://HOST:PORT. An agent is FILE.py:FUNCTION or a
    command; only `episode_timeout` and `memory_mib` limit it. `tool_kwargs` fill keyword-only
    parameters, by tool.
    """

    tools: Sequence[str] = ()
    environment: str = ""
    agent: str = ""
    environment_kwargs: Mapping[str, object] = field(default_factory=dict)
    tool_kwargs: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tool_timeout: float = 30.0  # seconds per call, `reset`, `step` and score, without waits for a processor
    episode_timeout: float | None = None  # seconds from `start`, the policy's turns included
    max_parallel_calls: int = 8  # calls of a turn that are executed; the others get an error text
    max_response_length: int = 4096  # characters of one result's text
    truncate_side: TruncateSide = "middle"
    max_images: int = 8  # pictures that the environment may add to an episode
    memory_mib: int | None = 4096  # of a worker, beyond what loading took

    @property
    def name(self) -> str:
        return self.environment or self.agent or ", ".join(self.tools)

    def __post_init__(self) -> None:
        if isinstance(self.tools, str):
            raise EnvironmentSpecError(f"tools is a list, got {self.tools!r}")
        given = [list(self.tools), self.environment, self.agent]
        if sum(map(bool, given)) != 1:
            found = ", ".join(str(one) for one in given if one) or "none"
            raise EnvironmentSpecError(f"name either tools, an environment or an agent, got {found}")
        if self.agent and self.episode_timeout is None:
            raise EnvironmentSpecError("an agent needs an episode_timeout")
        if self.truncate_side not in get_args(TruncateSide):
            raise EnvironmentSpecError(f"the truncate side is left, right or middle, got {self.truncate_side!r}")
        for name in ("tool_timeout", "max_parallel_calls", "max_response_length"):
            if getattr(self, name) <= 0:
                raise EnvironmentSpecError(f"{name} must be positive, got {getattr(self, name)}")
        if self.episode_timeout is not None and self.episode_timeout <= 0:
            raise EnvironmentSpecError(f"episode_timeout must be positive, or None, got {self.episode_timeout}")
        if self.max_images < 0:
            raise EnvironmentSpecError(f"max_images must not be negative, got {self.max_images}")
