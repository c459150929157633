"""Configuration section `worker.reward`: the reward function and its processes."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from r1_cli.config.files import reward_problems, sequential_problems
from r1_cli.config.problems import KeyProblem, KeyRemark
from r1_cli.config.section import Count, NonNegative, Positive, Section, Tree, UserPath


def _with_function(value: object) -> object:
    return f"{value}:main" if isinstance(value, str) and value.endswith(".py") else value


class OverlongBufferConfig(Section):
    """DAPO's soft overlong penalty: the last `len` tokens before data.max_response_length cost reward."""

    enable: bool = False  # penalize long answers
    len: Count | None = None
    penalty_factor: NonNegative = 1.0  # penalty of an answer of full length

    def problems(self, max_response_length: int) -> Iterator[KeyProblem]:
        key = "worker.reward.overlong_buffer.len"
        if self.enable and self.len is None:
            yield (
                key,
                f"is missing: how many of data.max_response_length ({max_response_length}) tokens begin to cost; "
                "DAPO: a fifth",
            )
        elif self.enable and self.len is not None and self.len > max_response_length:
            yield key, f"must be at most data.max_response_length ({max_response_length})"


class RewardConfig(Section):
    reward_function: Annotated[UserPath, BeforeValidator(_with_function)] | None = None  # `math` or `file.py:function`
    reward_function_kwargs: Tree = Field(default_factory=dict)
    reward_type: Literal["batch", "sequential"] | None = None  # older; today the file's own REWARD_TYPE
    skip_special_tokens: bool = True  # remove them from the text for the reward
    num_cpus: Count = 1  # worker processes
    timeout: Positive = 30.0  # seconds per sample
    failure_score: float = 0.0  # score of a sample that could not be scored
    failure_policy: Literal["score", "drop", "stop"] = "score"  # failure_score, leave it out, or stop the run
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    def file_problems(self) -> Iterator[KeyProblem]:
        keys = "worker.reward.reward_function", "worker.reward.reward_function_kwargs"
        yield from reward_problems(keys, self.reward_function, self.reward_function_kwargs)
        if self.reward_type == "sequential" and self.reward_function:
            yield from sequential_problems(self.reward_function)


REMARKS = (
    KeyRemark(
        "worker.reward.overlong_buffer",
        "set its enable to true",
        lambda v, c: not c.worker.reward.overlong_buffer.enable,
    ),
)
