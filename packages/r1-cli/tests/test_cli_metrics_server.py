"""Prometheus gets the last record and each process's numbers, with the token if there is one."""

import time
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from cli_processes import write
from patience import eventually

from r1_cli.config.trainer import TrainerConfig
from r1_cli.runs import processes
from r1_cli.runs.processes import DRIVER, Process, last_seen, record_driver, this_machine
from r1_cli.runs.track.metrics_server import MetricsServer, process_metrics, render, summarize

NOW = time.time()
RANK = Process(
    "learner-0", "far", "another boot", 7, 1, NOW, NOW - 40, memory=2**31, device_memory=2**30, tokens=9,
    seconds={"call.policy.step": 1.5},
)  # fmt: skip


def test_each_process_and_number_is_in_the_text(tmp_path: Path) -> None:
    write(tmp_path, RANK)
    write(tmp_path, replace(RANK, name="engine-0", pid=8, device_memory=None))
    write(tmp_path, replace(RANK, name="learner-0", pid=9, began=NOW - 60, tokens=1))  # died, and was started again
    lines = render(tmp_path, 3, {"reward/overall": 0.5, 'a"b': float("nan")}).splitlines()
    labels = 'process="learner-0",host="far"'
    for line in (
        "r1_step 3.0", "r1_starts_total 0.0", 'r1_metric{name="reward/overall"} 0.5', 'r1_metric{name="a\\"b"} NaN',
        f"r1_process_resident_memory_bytes{{{labels}}} {2.0**31}", f"r1_process_tokens_total{{{labels}}} 9.0",
        f"r1_process_device_memory_bytes{{{labels}}} {2.0**30}",
        f"r1_process_heartbeat_timestamp_seconds{{{labels}}} {NOW - 40!r}",
        f'r1_process_phase_seconds_total{{{labels},phase="call.policy.step"}} 1.5',
        "# TYPE r1_process_tokens_total counter", f"r1_process_restarts_total{{{labels}}} 1.0",
    ):  # fmt: skip
        assert line in lines, line
    assert len({line.partition(" ")[0] for line in lines if line[0] != "#"}) == sum(line[0] != "#" for line in lines)
    assert not any("device" in line and "engine-0" in line for line in lines)


def test_trackers_and_the_terminal_get_all_processes_but_the_driver() -> None:
    engine = replace(RANK, name="engine-0", machine=this_machine(), device_memory=None)
    found = [RANK, replace(RANK, name=DRIVER), engine]
    assert process_metrics(found, NOW) == {
        "perf/memory_gb/learner-0": 2.0, "perf/memory_gb/engine-0": 2.0, "perf/device_memory_gb/learner-0": 1.0,
        "perf/silent_s/learner-0": pytest.approx(40), "perf/silent_s/engine-0": pytest.approx(40),
    }  # fmt: skip
    told = "2 processes · at most 2.00 GiB (engine-0) · learner-0: silent for 40 s · engine-0: gone"
    assert summarize(found, NOW) == told
    assert summarize(found[1:2], NOW) == ""


def test_the_drivers_thread_reads_the_records_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "BEAT_SECONDS", 0.02)
    with record_driver(tmp_path):
        write(tmp_path, RANK)
        assert eventually(lambda: [one.name for one in last_seen()[1]] == [DRIVER, "learner-0"])
    assert eventually(lambda: not last_seen()[1])


def test_requests_need_the_token_and_there_is_one_path(tmp_path: Path) -> None:
    server = MetricsServer(tmp_path, "127.0.0.1", 0, "a-long-random-word")
    try:
        server.log(4, {})
        authorized = {"authorization": "Bearer a-long-random-word"}
        with urlopen(Request(server.url, headers=authorized)) as reply:
            assert "r1_step 4.0" in reply.read().decode()
        wrong = {"authorization": "Bearer another-word-than-that"}
        for url, headers, status in (
            (server.url, {}, 401),
            (server.url, wrong, 401),
            (server.url + "x", authorized, 404),
        ):
            with pytest.raises(HTTPError) as refused:
                urlopen(Request(url, headers=headers))
            assert refused.value.code == status
    finally:
        server.close()


def test_an_open_address_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = TrainerConfig(metrics_port=0, metrics_host="0.0.0.0")
    ((key, told),) = trainer.problems(validates=True)
    assert key == "trainer.metrics_host"
    assert "R1_METRICS_TOKEN" in told
    monkeypatch.setenv("R1_METRICS_TOKEN", "a-long-random-word")
    assert not [*trainer.problems(validates=True)]
