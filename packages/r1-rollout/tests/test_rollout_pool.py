"""Dispatch in a pool: the smallest backlog gets the next group, a failed group another member, and none is lost."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from r1_rollout.errors import EngineError
from r1_rollout.pool.dispatch import Dispatch, Fleet
from r1_rollout.pool.pool import require_agreement
from r1_rollout.pool.tasks import Backlog, MemberLost, Task
from r1_rollout.types import Completion, SamplingParams

PARAMS = SamplingParams(max_tokens=10, n=2)


class Quiet:
    """A member that keeps its groups until the test finishes them."""

    reserve = 0
    prefilled: int | None = 5

    def __init__(self, name: str) -> None:
        self.name, self.backlog = name, Backlog()
        self.given: list[int] = []
        self.told_off: list[int] = []
        self.closed: list[bool] = []

    def submit(self, tasks: Sequence[Task]) -> None:
        self.given += [task.index for task in tasks]

    def cancel(self, index: int) -> None:
        self.told_off.append(index)

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
    assert [(one.backlog.tokens, one.backlog.samples) for one in (first, second)] == [(0, 0), (0, 0)]


def test_no_waiting_group_is_looked_at_while_all_members_are_full() -> None:
    class Counted(dict[int, Any]):
        looks = 0

        def __getitem__(self, index: int) -> Any:
            Counted.looks += 1
            return super().__getitem__(index)

    members = [Quiet("a"), Quiet("b")]
    dispatch = Dispatch(Fleet(members), prompts(*[1] * 500), PARAMS, max_sequences=4)
    dispatch._tasks = Counted(dispatch._tasks)
    assert sum(map(len, dispatch._assign().values())) == 4
    first = Counted.looks
    assert first <= 4 * 4
    assert dispatch._assign() == {}
    assert Counted.looks == first
    dispatch.finish(0, [])
    assert [[task.index for task in tasks] for tasks in dispatch._assign().values()] == [[4]]
    assert Counted.looks <= first + 6


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
    assert (dead.backlog.samples, other.backlog.samples) == (0, 0)


def session(*members: Quiet, slots: int = 2) -> Dispatch:
    """A session on members of two slots each."""
    dispatch = Dispatch(Fleet(members), [], PARAMS, max_sequences=slots, session=True)  # type: ignore[arg-type]
    return dispatch.start({member: member for member in members})  # type: ignore[misc]


def turn(*tokens: int, n: int = 1) -> tuple[Any, SamplingParams]:
    return SimpleNamespace(id="p", token_ids=tokens), replace(PARAMS, n=n)


def test_a_session_takes_groups_at_any_time_and_waits_for_the_first_that_finishes() -> None:
    member = Quiet("a")
    dispatch = session(member)
    assert dispatch.take(None) == []
    for number in range(3):
        assert dispatch.add(*turn(1)) == number
    until(lambda: member.given == [0, 1])  # two slots
    assert dispatch.take(0) == dispatch.take(0.01) == []
    threading.Timer(0.05, finish, (dispatch, member, 1)).start()
    assert dispatch.take(None) == [(1, None, ["a 1"])]  # type: ignore[comparison-overlap]
    until(lambda: member.given == [0, 2])
    finish(dispatch, member, 0)
    finish(dispatch, member, 2)
    assert [index for index, _, _ in dispatch.take(10)] == [0, 2]
    assert not dispatch.pending
    assert dispatch.add(*turn(1)) == 3
    until(lambda: member.given == [3])
    dispatch.end("done")
    with pytest.raises(RuntimeError, match="this session is over: done"):
        dispatch.take(None)


def test_a_group_of_more_samples_needs_more_room() -> None:
    member = Quiet("a")
    dispatch = session(member, slots=3)
    dispatch.add(*turn(1, n=2))
    dispatch.add(*turn(1, n=2))
    dispatch.add(*turn(1, n=1))  # the one behind the second has room
    until(lambda: member.given == [0, 2])
    finish(dispatch, member, 0)
    until(lambda: member.given == [2, 1])
    dispatch.end("done")
    assert member.backlog == Backlog()


def test_a_cancelled_group_never_comes_wherever_it_is() -> None:
    member = Quiet("a")
    dispatch = session(member)
    for _ in range(4):
        dispatch.add(*turn(1))
    until(lambda: member.given == [0, 1])
    dispatch.cancel(3)  # waits
    dispatch.cancel(0)  # runs: the member is told, and reports it
    assert member.told_off == [0]
    finish(dispatch, member, 0, ConnectionError("cancelled"))
    until(lambda: member.given == [1, 2])
    finish(dispatch, member, 1)
    dispatch.cancel(1)  # has finished, and was not taken
    finish(dispatch, member, 2)
    assert [index for index, _, _ in dispatch.take(10)] == [2]
    assert not dispatch.pending
    assert member.backlog == Backlog()
    dispatch.end("done")


def test_samples_of_a_split_group_come_once_each_and_make_room_though_their_member_fails() -> None:
    first, second = Quiet("a"), Quiet("b")
    dispatch = Dispatch(Patient([first, second]), [], PARAMS, max_sequences=3, max_attempts=2, session=True)  # type: ignore[arg-type,list-item]
    dispatch.start({first: first, second: second})  # type: ignore[dict-item]
    one = Completion([1], [0.0], "stop", 0)
    other = Completion([2], [0.0], "stop", 0)
    assert dispatch.prefilled == 10
    second.prefilled = None
    assert dispatch.prefilled is None
    dispatch.add(*turn(1, n=3), split=True)
    until(lambda: first.given == [0])
    dispatch.deliver(0, 2, one)
    assert first.backlog.samples == 2
    assert dispatch.take(10) == [(0, 2, [one])]
    assert dispatch.is_open(0)
    finish(dispatch, first, 0, ConnectionError("nonsense"))
    until(lambda: second.given == [0])
    assert first.backlog == Backlog()
    dispatch.deliver(0, 2, other)
    dispatch.deliver(0, 0, other)
    finish(dispatch, second, 0, [other, other, other])
    assert dispatch.take(10) == [(0, 0, [other]), (0, 1, [other])]
    assert not dispatch.pending
    assert not dispatch.is_open(0)
    assert second.backlog == Backlog()
    dispatch.add(*turn(1, n=3), split=True)
    until(lambda: first.given == [1])
    dispatch.deliver(1, 0, one)
    dispatch.cancel(1)
    dispatch.deliver(1, 1, one)
    finish(dispatch, first, 1, [])
    assert not dispatch.pending
    assert dispatch.take(0) == []
    assert first.backlog == Backlog()
    dispatch.end("done")


def test_a_turn_goes_to_the_member_that_has_its_beginning_unless_that_is_full() -> None:
    first, second = Quiet("a"), Quiet("b")
    dispatch = session(first, second)
    beginnings = [tuple(range(number, number + 40)) for number in (100, 200)]
    for beginning in beginnings:
        dispatch.add(*turn(*beginning))
    until(lambda: (first.given, second.given) == ([0], [1]))
    finish(dispatch, second, 1)
    assert len(dispatch.take(10)) == 1
    dispatch.add(*turn(*beginnings[0], 7, 8))  # its first turn is at the first member, which is busier
    until(lambda: first.given == [0, 2])
    for number in range(2):
        dispatch.add(*turn(*beginnings[1], number))
    until(lambda: second.given == [3, 4])
    dispatch.add(*turn(*beginnings[0], 5))  # group 5 waits for the first member, 6 for the second
    dispatch.add(*turn(*beginnings[1], 6))
    finish(dispatch, second, 3)
    until(lambda: second.given == [4, 6])
    finish(dispatch, first, 0)
    until(lambda: first.given == [2, 5])
    dispatch.add(*turn(*beginnings[0], 7))
    finish(dispatch, second, 4)
    until(lambda: second.given == [6, 7])  # nothing else could go to the second member, and the first is full
    dispatch.end("done")


def test_members_must_agree_within_the_tolerance_of_each_sequence() -> None:
    same, near, off = [[-1.0, -2.0], [-0.5]], [[-1.0, -2.0], [-0.501]], [[-1.0, -2.0], [-0.6]]
    require_agreement(["a", "b", "c"], [same, same, near], 0.01)
    with pytest.raises(EngineError, match=r"a and c give .* differ by 0\.1 of their size \(tolerance 0\.01\)"):
        require_agreement(["a", "b", "c"], [same, near, off], 0.01)
    with pytest.raises(EngineError, match="differ by nan"):
        require_agreement(["a", "b"], [same, [[-1.0, -2.0], [float("nan")]]], 0.01)
