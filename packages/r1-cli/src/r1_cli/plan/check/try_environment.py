"""Try tools or an environment without a model: hangs, deaths, faults, shared state, repetition, seconds."""

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from r1_cli.plan.check.environment_turns import CONTROL_TOKENS, KINDS, EpisodePlan, make_plans
from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import CallRecord, EnvironmentSetup, Message, StepResult
from r1_rewards.types import Failure, Score

SAMPLE = 10  # episodes that are played again, one after another
EXAMPLE = 160  # characters of a quoted text


@dataclass(frozen=True, slots=True)
class EnvironmentCheck:
    """One line of the report; `passed` is None for a mere measurement."""

    check: str
    result: str
    passed: bool | None = None


@dataclass(slots=True)
class Played:
    """One episode as it was played."""

    plan: EpisodePlan
    results: list[StepResult] = field(default_factory=list)
    score: Score | None = None
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def calls(self) -> list[CallRecord]:
        return [call for result in self.results for call in result.calls]

    @property
    def messages(self) -> list[Message]:
        return [message for result in self.results for message in result.messages]

    def digest(self) -> str:
        """Everything that must be equal if the episode is played again."""
        outcome = self.score.parts if self.score else self.failure and self.failure.cause
        steps = [
            (result.messages, result.reward, result.done, result.state, [call.cause for call in result.calls])
            for result in self.results
        ]
        return json.dumps([steps, outcome], default=repr)


def try_environment(
    setup: EnvironmentSetup,
    rows: Sequence[tuple[dict[str, object], Sequence[object]]],
    *,
    episodes: int,
    turns: int,
    workers: int,
) -> Iterator[EnvironmentCheck]:
    """Yield the checks of tools or an environment, played as in training. `rows` are pairs of a row and its pictures.

    Raises EnvironmentSpecError if they cannot be loaded.
    """
    begin = time.perf_counter()
    with EnvironmentPool(setup, workers=workers) as pool:
        loaded = time.perf_counter() - begin
        names = [tool["function"]["name"] for tool in pool.tools]
        kind = f"tools {', '.join(names)}" if names else "an environment that reads turns"
        judges = ", judges its episodes" if pool.scores else ""
        yield EnvironmentCheck("loads", f"{kind}{judges}; {loaded:.2f} s", True)
        yield from _check_docstrings(pool)
        plans = make_plans(rows, pool.tools, episodes, turns)
        begin = time.perf_counter()
        together = play(pool, plans, len(plans))
        seconds = time.perf_counter() - begin
    yield from _check_faults(together)
    yield from _check_texts(together, setup)
    yield from _describe_prompts(together)
    alone = [_play_alone(setup, plans[:SAMPLE]) for _ in range(2)]
    yield from _check_repetition(together[:SAMPLE], *alone, deterministic=pool.deterministic)
    yield from _describe_scores(together, pool)
    yield from _describe_seconds(together, seconds)


def play(pool: EnvironmentPool, plans: Sequence[EpisodePlan], concurrent: int, kind: str = "") -> list[Played]:
    """Play episodes of one of `pool.kinds`, `concurrent` at a time, and return them in the order of their plans."""
    played = [Played(plan) for plan in plans]
    waiting, open_episodes, began = list(range(len(plans)))[::-1], set[int](), dict[int, float]()
    while waiting or open_episodes:
        while waiting and len(open_episodes) < concurrent:
            number = waiting.pop()
            open_episodes.add(number)
            began[number] = time.perf_counter()
            pool.start(str(number), plans[number].row, plans[number].pictures, kind=kind)
        for key, answer in pool.poll():
            number, one = int(key), played[int(key)]
            if isinstance(answer, StepResult):
                one.results.append(answer)
                turn = len(one.results) - 1
                if not answer.done and turn < len(one.plan.turns):
                    pool.step(key, one.plan.turns[turn])
                    continue
                pool.finish(key)
                if pool.kinds[kind].scores:
                    continue
            elif isinstance(answer, Score):
                one.score = answer
            else:
                one.failure = answer
            one.seconds = time.perf_counter() - began[number]
            open_episodes.discard(number)
    return played


def _play_alone(setup: EnvironmentSetup, plans: Sequence[EpisodePlan]) -> list[Played]:
    # In one process: a worker that has answered on a busy machine looks as if it waited, and a second one would start
    # with globals of its own.
    with EnvironmentPool(setup, workers=1, overlap=False) as pool:
        return play(pool, plans, 1)


def _check_docstrings(pool: EnvironmentPool) -> Iterator[EnvironmentCheck]:
    lacking = []
    for tool in pool.tools:
        function = tool["function"]
        if not function["description"]:
            lacking.append(function["name"])
        known = function["parameters"]["properties"]
        lacking += [
            f"{function['name']}.{name}" for name, one in known.items() if not {"description", "type"} <= {*one}
        ]
    if lacking:
        told = "the policy sees no description or type of " + ", ".join(lacking)
        yield EnvironmentCheck("docstrings", told)


def _check_faults(played: Sequence[Played]) -> Iterator[EnvironmentCheck]:
    failures = [(one, one.failure) for one in played if one.failure]
    lost = Counter({kind: sum(one.plan.kind == kind for one, _ in failures) for kind in KINDS})
    for check, causes in (
        ("hangs", ("timeout",)), ("keeps its process", ("crash", "out_of_memory")),
        ("raises nothing", ("exception", "wrong_shape", "non_finite")),
    ):  # fmt: skip
        found = [(one, failure.message) for one, failure in failures if failure.cause in causes]
        calls = [(one, f"{call.name}: {call.error}") for one in played for call in one.calls if call.cause in causes]
        counted = f"{len(found)} of {len(played)} episodes are lost, {len(calls)} calls fail"
        # An exception of a tool is an answer to the policy, unless the arguments were as the schema wants them.
        fatal = [*found, *(calls if check != "raises nothing" else [])]
        example = next(iter([*found, *calls]), None)
        told = (
            f"{counted}: {_input(example[0])}: {shorten(example[1])}" if example else f"none of {len(played)} episodes"
        )
        name = "never hangs" if check == "hangs" else check
        yield EnvironmentCheck(name, told, not fatal)
    if lost.total():
        yield EnvironmentCheck("lost episodes", ", ".join(f"{kind} {count}" for kind, count in lost.items() if count))
    scripted = [call for one in played if one.plan.kind == "scripted" for call in one.calls]
    errors = sum(bool(call.error) for call in scripted)
    if errors:
        yield EnvironmentCheck("errors of valid calls", f"{errors} of {len(scripted)}; the policy reads them")


def _check_texts(played: Sequence[Played], setup: EnvironmentSetup) -> Iterator[EnvironmentCheck]:
    found = Counter[str]()
    for one in played:
        for text in map(describe_content, ([message] for message in one.messages)):
            found.update(token for token in CONTROL_TOKENS if token in text and one.plan.kind != "hostile")
    told = ", ".join(f"{token} × {count}" for token, count in found.most_common(5))
    yield EnvironmentCheck(
        "control tokens", f"{told}: r1 writes them as plain text" if told else "none in its texts", not told
    )
    calls = [call for one in played for call in one.calls]
    truncated = [call.truncated for call in calls if call.truncated]
    if truncated:
        limit = setup.max_response_length
        told = f"{len(truncated)} of {len(calls)} have more than {limit:,} characters, at most {max(truncated):,} more"
        yield EnvironmentCheck("long results", told)
    if replaced := sum(call.replaced for call in calls):
        yield EnvironmentCheck("characters replaced", f"{replaced} NULs and lone surrogates became ?")


def _check_repetition(
    together: Sequence[Played], first: Sequence[Played], second: Sequence[Played], *, deterministic: bool
) -> Iterator[EnvironmentCheck]:
    changed = [one for one, again in zip(first, second, strict=True) if one.digest() != again.digest()]
    told = f"{len(changed)} of {len(first)} episodes differ when they are played again"
    if changed and not deterministic:
        yield EnvironmentCheck("repetition", f"{told}: `r1 replay` reads its answers from the record")
    else:
        yield EnvironmentCheck("repetition", told, not changed)
    shared = [one for one, other in zip(first, together, strict=True) if one.digest() != other.digest()]
    if changed:
        return
    told = "episodes are the same alone and among others"
    if shared:
        told = f"{len(shared)} of {len(first)} episodes differ among others: a global, a file or a server is shared"
    yield EnvironmentCheck("shares nothing", told, not shared)


def _describe_prompts(played: Sequence[Played]) -> Iterator[EnvironmentCheck]:
    """Describe what `reset` adds to prompts, and whether it is the same for the episodes of one row."""
    begun = [one for one in played if one.results and one.results[0].messages]
    added = [(one.plan.row, describe_content(one.results[0].messages)) for one in begun]
    if not added:
        return
    by_row: dict[str, set[str]] = {}
    for row, told in added:
        by_row.setdefault(json.dumps(row, default=repr), set()).add(told)
    same = (
        "the same in all episodes of a row"
        if all(len(found) == 1 for found in by_row.values())
        else ("different in the episodes of a row, which then share no prompt")
    )
    yield EnvironmentCheck("added to the prompt", f"by reset(), {same}: {shorten(added[0][1])}")


def describe_content(messages: Sequence[Message]) -> str:
    """Return the text of messages, pictures as [picture]."""
    return "".join(
        part if isinstance(part, str) else part.get("text", "[picture]")
        for message in messages
        for part in ([message["content"]] if isinstance(message["content"], str) else message["content"])
    )


def _describe_scores(played: Sequence[Played], pool: EnvironmentPool) -> Iterator[EnvironmentCheck]:
    over = sum(bool(one.results) and one.results[-1].done for one in played)
    turns = sum(len(one.results) - 1 for one in played if one.results) / max(1, len(played))
    yield EnvironmentCheck("ends", f"{over} of {len(played)} episodes end by themselves; {turns:.1f} turns on average")
    values = [one.score.value for one in played if one.score]
    if pool.scores and values:
        spread = (
            f"from {min(values):.3g} to {max(values):.3g}" if min(values) < max(values) else f"always {values[0]:.3g}"
        )
        by_kind = ", ".join(
            f"{kind} {sum(found) / len(found):.3g}"
            for kind in KINDS
            if (found := [one.score.value for one in played if one.score and one.plan.kind == kind])
        )
        yield EnvironmentCheck("scores", f"{spread}; mean by turns: {by_kind}")


def _describe_seconds(played: Sequence[Played], seconds: float) -> Iterator[EnvironmentCheck]:
    found = sorted(call.seconds for one in played for call in one.calls)
    if found:
        p50, p99 = found[len(found) // 2], found[len(found) * 99 // 100]
        told = f"p50 {1000 * p50:.1f}, p99 {1000 * p99:.1f}, max {1000 * found[-1]:.1f} ({len(found)} calls)"
        yield EnvironmentCheck("milliseconds per call", told)
    yield EnvironmentCheck("seconds of all episodes", f"{seconds:.1f}")


def _input(played: Played) -> str:
    return f"{played.plan.kind} turns" + (f" ({played.plan.name})" if played.plan.name else "")


def shorten(text: str) -> str:
    return text if len(text) <= EXAMPLE else text[: EXAMPLE - 1] + "…"
