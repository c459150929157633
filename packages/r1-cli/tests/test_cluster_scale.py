"""What ranks and engines cost together grows no faster than their number: futures, bytes, references and files."""

import pickle
import subprocess
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from r1_cli.cluster import rank as rank_module
from r1_cli.cluster.direct import DirectBackend
from r1_cli.cluster.rank import Rank, TokenBalance
from r1_cli.cluster.rank_client import pack_rows
from r1_cli.cluster.weights import RankedWeights
from r1_cli.runs import processes
from r1_core.learner.trainable import LearnerInfo


class Touched(Future):  # type: ignore[type-arg]
    """A result that comes when the one before has been read; `touches` counts who looks at any of them."""

    touches = 0

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def __getattribute__(self, name: str) -> Any:
        if name == "_condition":
            Touched.touches += 1
        return super().__getattribute__(name)

    def result(self, timeout: float | None = None) -> Any:
        self.read.set()
        return super().result(timeout)

    def future(self) -> "Touched":
        return self


def touches(count: int) -> int:
    """Return how often the futures of one call to `count` actors are touched, if these answer one by one."""
    from r1_cli.cluster.actors import ActorGroup

    group, calls = object.__new__(ActorGroup), [Touched() for _ in range(count)]
    group._patience = None

    def answer() -> None:
        for number, call in enumerate(calls):
            call.set_result(number)
            assert call.read.wait(60)

    Touched.touches = 0
    thread = threading.Thread(target=answer)
    thread.start()
    assert group._collect(calls, "nothing") == [*range(count)]
    thread.join()
    return Touched.touches


def test_a_call_of_all_touches_each_result_as_often_however_many_there_are() -> None:
    pytest.importorskip("ray")
    assert touches(64) <= 4.4 * touches(16)


def test_rows_of_whole_groups_are_sent_as_two_numbers_and_others_as_they_are() -> None:
    assert len(pickle.dumps(pack_rows([*range(500, 5000)]))) < 100
    assert [*pack_rows([*range(500, 5000)])] == [*range(500, 5000)]
    assert [*pack_rows([])] == []
    for rows in ([3, 1, 2], [1, 3], [2, 1]):
        assert np.array_equal(pack_rows(rows), np.array(rows, np.int32))


def test_the_balance_of_all_ranks_is_returned_by_one() -> None:
    ranks = [Rank(lambda parallel: None, number, 3) for number in range(3)]  # type: ignore[arg-type, return-value]
    for rank in ranks:
        rank.learner = SimpleNamespace(describe=lambda: LearnerInfo(1, 6.0, "cpu", None, None))  # type: ignore[assignment]
        rank._loads = TokenBalance(3)
    assert [rank.call("policy", "describe", None, {}).tokens for rank in ranks] == [(0, 0, 0), (), ()]  # type: ignore[attr-defined]


class Stored:
    """A stored value that counts who loads it."""

    def __init__(self, value: Any) -> None:
        self.value, self.loads = value, 0

    def load(self) -> Any:
        self.loads += 1
        return self.value


def test_the_engines_of_a_direct_transfer_are_known_to_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    sender = SimpleNamespace(send=lambda: None)
    monkeypatch.setattr(rank_module, "open_sender", lambda _, engines, *rest: opened.append(len(engines)) or sender)
    ranks = [Rank(lambda parallel: None, number, 3) for number in range(3)]  # type: ignore[arg-type, return-value]
    for rank in ranks:
        rank.learner = SimpleNamespace(  # type: ignore[assignment]
            offload=lambda: None, weights=list, synced_tensors=lambda: [("w", torch.zeros(1))]
        )
    stored: list[Stored] = []

    def call(verb: str, *args: Any) -> None:
        for rank in ranks:
            getattr(rank, verb)(*args)

    def put(value: Any) -> Any:
        stored.append(Stored(value))
        return stored[-1]

    RankedWeights(call, put, 1).send(DirectBackend("ipc", 1), ["engine"] * 5, None)  # type: ignore[list-item]
    assert opened == [5, 0, 0]
    assert [one.loads for one in stored] == [1]


def test_ps_reads_the_records_of_a_run_once_and_looks_only_at_the_process_that_has_its_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    opened = [(tmp_path / "logs" / f"learner-{number}.log").open("w") for number in range(5)]
    child = subprocess.Popen(["sleep", "600"], pass_fds=[file.fileno() for file in opened])
    here, started = processes.this_machine(), processes.started_at
    others = [processes.Process(f"learner-{pid}", "", here, pid, 0, 0.0) for pid in range(-9, 0)]
    own = processes.Process("driver", "", here, child.pid, started(child.pid) or 0, 0.0)
    read: list[Path] = []
    looked: list[int] = []
    monkeypatch.setattr(processes, "read_processes", lambda run: read.append(run) or [*others, own])
    monkeypatch.setattr(processes, "started_at", lambda pid: looked.append(pid) or started(pid))
    try:
        found = processes.find_runs()
    finally:
        child.kill()
        child.wait()
        for file in opened:
            file.close()
    assert tmp_path in found
    assert read.count(tmp_path) == 1
    assert not {one.pid for one in others} & {*looked}
