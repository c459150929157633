"""Check rows of each source, and the rewards on them."""

from collections.abc import Iterable, Iterator
from itertools import islice

from r1_cli.build.rows import OpenSource
from r1_cli.config import RunConfig
from r1_cli.plan.check.findings import Finding, Subject
from r1_cli.plan.data_check.findings import TITLES, Report
from r1_cli.train.types import Item
from r1_data.render import Renderer
from r1_data.types import DataError
from r1_rewards.spec import parse_spec
from r1_rewards.types import RewardInput
from r1_rewards.verifiers import BUILTINS

ROWS = 64  # of each source, spread evenly
FIXES = {
    "overlong": "raise data.max_prompt_length, or lower data.max_pixels",
    "media": "correct the paths, data.image_dir or data.image_key",
    "markers": "write as many <image> or <video> markers as there are media",
    "missing column": "name the columns with data.prompt_key and data.answer_key",
    "leak": "take these rows out of one of the two files",
    "reward": "choose the reward that reads these ground truths, or correct them",
}
QUESTIONS = 8
LONGEST = 5.0  # seconds that a reward may take for an answer here, at most


def _no_progress(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    yield from items


def check_rows(subject: Subject) -> Iterator[Finding]:
    from r1_cli.build.rendering import build_renderer
    from r1_cli.plan.data_check.examine import check
    from r1_data.check import Inspector

    renderer = build_renderer(subject.config, subject.model)
    if subject.tunes:
        report = check_tuning(subject.written, renderer)
    else:
        inspector = Inspector(renderer, subject.config.data.max_prompt_length)
        report = check(subject.config, inspector, None, _no_progress, most=ROWS)
    for found in report.ordered():
        message = f"{found.count} × {TITLES.get(found.kind, found.kind)}"
        first = found.examples[0][0] if found.examples else ""
        fix = FIXES.get(found.kind, "r1 data check names every such row")
        yield Finding(f"data.{found.kind}", found.level, f"{message}: {first}", fix)


def check_tuning(config: RunConfig, renderer: Renderer) -> Report:
    from r1_cli.build.demonstrations import build_conversation_renderer
    from r1_cli.plan.data_check.conversations import check_conversations
    from r1_data.conversations.check import ConversationInspector

    own = ConversationInspector(build_conversation_renderer(config, renderer))
    return check_conversations(config, own, None, _no_progress, most=ROWS)


def check_rewards(subject: Subject) -> Iterator[Finding]:
    """Try each reward on its rows, except those that need a model or a service."""
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
        if not (questions := list(islice(questions_of(one), QUESTIONS))):
            continue
        for found in try_questions(spec, kwargs, questions, timeout=min(reward.timeout, LONGEST)):
            if found.check == SPEED:
                yield Finding("reward.latency", "note", f"{spec}: {found.check}: {found.result}")
            if found.passed is False:
                fix = f"r1 reward test {spec} shows all that was tried"
                yield Finding(f"reward.{found.check}", "error", f"{spec}: {found.check}: {found.result}", fix)


def questions_of(one: OpenSource) -> Iterator[RewardInput]:
    """Yield the readable rows of a source as inputs of a reward, with an empty response."""
    from r1_cli.plan.check.try_reward import as_question

    for index in range(len(one.rows)):
        try:
            yield as_question(one.reader(*one.rows[index]))
        except DataError:
            continue  # reported by `check_rows`
