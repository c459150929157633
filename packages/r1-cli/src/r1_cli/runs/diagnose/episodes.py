"""Known problems of runs with tools or environments: by their numbers, and by their recorded turns."""

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from r1_cli.runs.diagnose.findings import Diagnosis
from r1_cli.runs.diagnose.signatures import Found, signature
from r1_cli.runs.history import History
from r1_cli.runs.reader import Row

FEW = 0.05  # calls of an episode
LEAST_EPISODES = 16
Numbers = Callable[[dict[str, float]], float]  # of a step


def _late(history: History, value: Numbers) -> tuple[float, str] | None:
    """Return the mean over the last quarter of the steps with episodes, and which steps; None below 3.

    A reason or a tool that does not occur in a step is not logged, and counts as 0.
    """
    steps = [one for one in history.steps if "episode/turns/mean" in one]
    if len(steps) < 3:
        return None
    late = steps[-max(3, len(steps) // 4) :]
    return fmean(map(value, late)), f"steps {late[0]['step']} to {late[-1]['step']}"


def _sum(step: dict[str, float], prefix: str, suffix: str) -> float:
    return sum(value for name, value in step.items() if name.startswith(prefix) and name.endswith(suffix))


# --- numbers ----------------------------------------------------------------------------------------------------------


@signature
def no_tool_calls(history: History) -> Found | None:
    """The policy does not call a tool."""
    late = _late(history, lambda step: step.get("episode/calls", 0.0))
    if late is None or late[0] > FEW:
        return None
    return (
        "the policy calls no tool",
        f"episode/calls is {late[0]:.2g} in {late[1]}",
        "read an answer in r1 view: does the prompt show the tools (r1 check), does multi_turn.format read the calls "
        "that the policy writes? else a warm start on episodes with calls, or rows that cannot be answered without",
    )


@signature
def calls_until_limit(history: History) -> Found | None:
    """Most episodes end at the limit of turns instead of with an answer."""
    late = _late(history, lambda step: step.get("episode/stop/max_turns", 0.0))
    if late is None or late[0] < 0.5:
        return None
    return (
        "episodes end at the limit of turns, without an answer",
        f"episode/stop/max_turns is {late[0]:.0%} in {late[1]}",
        "raise worker.rollout.multi_turn.max_assistant_turns if they need more; else say in the prompt when to answer, "
        "or give turns a small cost (Observation.reward)",
    )


@signature
def malformed_calls(history: History) -> Found | None:
    """Calls cannot be executed: malformed, with wrong arguments, or a tool that raises."""
    stopped = _late(history, lambda step: step.get("episode/stop/malformed_calls", 0.0))
    failed = _late(history, lambda step: _sum(step, "tool/", "/failures") / max(_sum(step, "tool/", "/calls"), 1.0))
    if stopped is None or failed is None or (stopped[0] < 0.1 and failed[0] < 0.3):
        return None
    return (
        "calls of tools are malformed or fail",
        f"{failed[0]:.0%} of the calls fail, and {stopped[0]:.0%} of the episodes end with malformed_calls, "
        f"in {stopped[1]}",
        "r1 view shows each call's error; r1 env test FILE:NAME tries the tool itself; multi_turn.format must be the "
        "format that the model was taught",
    )


@signature
def slow_tools(history: History) -> Found | None:
    """An average episode spends most of the sampling phase in its tools, one call after another."""

    def share(step: dict[str, float]) -> float:
        calls, seconds = _sum(step, "tool/", "/calls"), 0.0
        for name in (name for name in step if name.startswith("tool/") and name.endswith("/calls")):
            tool = name.removeprefix("tool/").removesuffix("/calls")
            seconds += step[name] * step.get(f"timing_s/tool/{tool}/mean", 0.0)
        of_episode = seconds / max(calls, 1.0) * step.get("episode/calls", 0.0)
        return of_episode / max(step.get("timing_s/gen", 0.0), 1.0)  # phases below a second need no advice

    late = _late(history, share)
    if late is None or late[0] < 0.5:
        return None
    return (
        "tools take most of the time of sampling",
        f"the calls of an average episode take {late[0]:.0%} of timing_s/gen in {late[1]}",
        "multi_turn.scheduling=arrival, more worker.rollout.multi_turn.num_workers, more episodes at a time "
        "(max_concurrent), a shorter tool_timeout, a faster tool",
    )


# --- recorded turns ---------------------------------------------------------------------------------------------------


def diagnose_episodes(rows: Sequence[Row], where: str) -> list[Diagnosis]:
    """Return the known problems in recorded episodes; [] for single answers."""
    episodes = [row for row in rows if row.get("turns")]
    if len(episodes) < LEAST_EPISODES:
        return []
    found = [repeated_calls(episodes, where), dropped_answers(episodes, where)]
    return [one for one in found if one is not None]


def repeated_calls(episodes: Sequence[Row], where: str) -> Diagnosis | None:
    """Episodes with several calls make the same call again."""
    several, repeated, example = 0, 0, ""
    for row in episodes:
        # An environment that reads text has calls without arguments.
        calls = [(one["tool"], one["arguments"]) for turn in row["turns"] for one in turn["calls"] or ()]
        calls = [one for one in calls if one[1] not in ("", "{}")]
        several += len(calls) > 1
        if len({*calls}) < len(calls):
            repeated += 1
            example = example or " ".join(Counter(calls).most_common(1)[0][0])[:80]
    if several < LEAST_EPISODES // 2 or repeated < 0.3 * several:
        return None
    return Diagnosis(
        "repeated_calls",
        "the same call is made again in an episode",
        f"{repeated} of {several} episodes with several calls ({where}), such as {example}",
        "does the policy see the result (r1 view)? was it cut (max_tool_response_length)? a tool may answer a "
        "repeated call with an error text",
    )


def dropped_answers(episodes: Sequence[Row], where: str) -> Diagnosis | None:
    """Episodes end because what the tools or the environment answered does not fit."""
    dropped = sum(row["stop_reason"] == "max_tokens" and row["turns"][-1]["role"] == "environment" for row in episodes)
    if dropped < 0.1 * len(episodes):
        return None
    return Diagnosis(
        "dropped_answers",
        "answers of tools do not fit, and end the episode",
        f"{dropped} of {len(episodes)} episodes end with max_tokens behind a tool's or environment's answer ({where})",
        "raise data.max_response_length, which counts tools' tokens, too; lower multi_turn.max_tool_response_length, "
        "data.max_pixels or max_images",
    )
