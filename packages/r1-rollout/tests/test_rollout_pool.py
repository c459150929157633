"""Dispatch in a pool: the smallest backlog gets the next group, a failed group another member, and none is lost."""

import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from r1_rollout.errors import EngineError
from r1_rollout.pool.dispatch import Backlog, Dispatch, Fleet, MemberLost
from r1_rollout.pool.pool import require_agreement
from r1_rollout.types import SamplingParams

PARAMS = SamplingParams(max_tokens=10, n=2)


class Quiet:
    """A member that keeps its groups until the test finishes them."""

    reserve = 0

    def __init__(self, name: str) -> None:
        self.name, self.backlog = name, Backlog()
        self.given: list[int] = []
        self.closed: list[bool] = []

    def submit(self, groups: Sequence[tuple[int, Any]]) -> None:
        self.given += [index for index, _ in groups]

    def close(self, *, wait: bool) -> Iterable[int]:
        self.closed.append(wait)
        left, self.given = self.given, []
        return left


class Patient(Fleet):
    """Lets groups try other members."""

    def retries(self, member: Any, error: BaseException) -> bool:
        return isinstance(error, ConnectionError)


def prompts(*lengths: int) -> list[Any]:
    return [SimpleNamespace(id=f"p{number}", token_ids=[1] * length) for number, length in enumerate(lengths)]


def begin(members: list[Quiet], lengths: Sequence[int], fleet: Any = Fleet, room: int = 2, **options: Any) -> Dispatch:
    dispatch = Dispatch(fleet(members), prompts(*lengths), PARAMS, max_sequences=2 * room, **options)
    return dispatch.start({member: member for member in members})  # type: ignore[misc]


def until(condition: Any) -> None:
    for _ in range(3000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("waited in vain")


def finish(dispatch: Dispatch, member: Quiet, index: int, outcome: Any = None) -> None:
    member.given.remove(index)
    dispatch.finish(index, outcome or [f"{member.name} {index}"])


def test_the_smallest_backlog_in_tokens_gets_the_next_group_and_is_empty_at_the_end() -> None:
    first, second = Quiet("a"), Quiet("b")
    dispatch = begin([first, second], [100, 1, 1, 1, 1, 1], room=3)
    until(lambda: len(first.given) + len(second.given) == 6)
    assert (first.given, second.given) == ([0, 4, 5], [1, 2, 3])  # fewest tokens first, until there is no room
    assert (first.backlog.tokens, second.backlog.tokens) == (162, 63)
    dispatch.arrived(0, 90)
    assert first.backlog.tokens == 72
    for member in (first, second):
        for index in list(member.given):
            finish(dispatch, member, index)
    assert sorted(index for index, _ in dispatch) == [0, 1, 2, 3, 4, 5]
    assert [(one.backlog.tokens, one.backlog.groups) for one in (first, second)] == [(0, 0), (0, 0)]


def test_a_failed_group_goes_to_another_member_though_the_first_is_idle() -> None:
    bad, busy = Quiet("bad"), Quiet("busy")
    dispatch = begin([bad, busy], [1, 50], Patient, max_attempts=3)
    until(lambda: bad.given and busy.given)
    finish(dispatch, bad, 0, ConnectionError("nonsense"))
    until(lambda: busy.given == [1, 0])
    finish(dispatch, busy, 0, ConnectionError("nonsense"))
    until(lambda: bad.given == [0])  # all others have failed it
    finish(dispatch, bad, 0, ConnectionError("nonsense"))
    with pytest.raises(ConnectionError, match="prompt p0 failed 3 times, at last: nonsense"):
        next(dispatch)
    assert (bad.closed, busy.closed) == ([True], [True])


def test_the_first_failure_ends_a_call_of_members_that_nobody_restarts_and_waits_for_no_other() -> None:
    dead, other = Quiet("dead"), Quiet("other")
    fleet = Fleet([dead, other])
    dispatch = Dispatch(fleet, prompts(1, 1, 1), PARAMS, max_sequences=4).start({dead: dead, other: other})
    until(lambda: len(dead.given) + len(other.given) == 3)
    finish(dispatch, other, other.given[0])
    dispatch.fail(dead, MemberLost("dead died in work"))
    assert next(dispatch)[1] == ["other 1"]  # type: ignore[comparison-overlap]
    with pytest.raises(EngineError, match="dead died in work"):
        next(dispatch)
    assert fleet.broken
    assert (dead.closed, other.closed) == ([False], [False])
    assert (dead.backlog.groups, other.backlog.groups) == (0, 0)


def test_members_must_agree_within_the_tolerance_of_each_sequence() -> None:
    same, near, off = [[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.501]], [[-1.0, -2.0], [-0.6]]
    require_agreement(["a", "b", "c"], [same, same, near], 0.01)
    with pytest.raises(EngineError, match=r"a and c give .* differ by 0\.1 of their size \(tolerance 0\.01\)"):
        require_agreement(["a", "b", "c"], [same, near, off], 0.01)
    with pytest.raises(EngineError, match="differ by nan"):
        require_agreement(["a", "b"], [same, [[-1.0, -2.0], [float("nan")]]], 0.01)
