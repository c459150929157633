"""Checks of the rewards: right answers beat wrong ones, hostile ones earn nothing and break nothing."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from r1_cli.plan.check.findings import Finding, Subject
from r1_data.types import DataError
from r1_rewards.spec import parse_spec
from r1_rewards.types import RewardInput
from r1_rewards.verifiers import BUILTINS

QUESTIONS = 8
LONGEST = 5.0  # seconds that a reward may take for an answer here, at most


def check_rewards(subject: Subject) -> Iterator[Finding]:
    """Try each reward, on its own rows. Those that ask a model or a service need it, and are passed over."""
    from r1_cli.plan.check.try_reward import SPEED, try_questions

    reward = subject.config.worker.reward
    tried: set[str] = set()
    for one in subject.sources:
        spec = one.source.reward_function or reward.reward_function or ""
        kwargs = one.source.reward_function_kwargs if one.source.reward_function else reward.reward_function_kwargs
        if (name := f"{spec} {kwargs!r}") in tried or not spec:
            continue
        tried.add(name)
        if spec == "combine" or not (spec in BUILTINS or parse_spec(spec).path):
            yield Finding("reward.not tried", "note", f"{spec} asks others, and was not tried")
            continue
        if not (questions := list(islice(_questions(one), QUESTIONS))):
            continue
        for found in try_questions(spec, kwargs, questions, timeout=min(reward.timeout, LONGEST)):
            if found.check == SPEED:
                yield Finding("reward.latency", "note", f"{spec}: {found.check}: {found.result}")
            if found.passed is False:
                fix = f"r1 reward test {spec} shows all that was tried"
                yield Finding(f"reward.{found.check}", "error", f"{spec}: {found.check}: {found.result}", fix)


def _questions(one: Any) -> Iterator[RewardInput]:
    from r1_cli.plan.check.try_reward import as_question

    for index in range(len(one.rows)):
        try:
            yield as_question(one.reader(*one.rows[index]))
        except DataError:
            continue  # told by the check of the rows
