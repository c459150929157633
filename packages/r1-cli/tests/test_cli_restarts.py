"""A run that loses a process starts again by itself, an error of the user's ends it, and each restart is counted."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from faults_table import note_fault
from patience import eventually

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.cluster.ray_connection import RayConnection
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import ConfigError, Problem, RunConfig
from r1_cli.config.trainer import TrainerConfig
from r1_cli.faults import watchdog as watchdog_module
from r1_cli.faults.processes import descendants_of, state_of
from r1_cli.faults.supervisor import EARLY_DEATHS, FATAL, supervised
from r1_cli.faults.watchdog import HungError, Watchdog
from r1_cli.jobs.context import RunFolder, find_restart
from r1_cli.jobs.train import RunEnd, run_with_restarts
from r1_cli.runs import restarts as restarts_module
from r1_cli.runs.report.page import describe_restart
from r1_cli.runs.restarts import Restart, Restarts
from r1_rewards import RewardInput, load
from r1_rewards.services.endpoint import Patience
from r1_rollout.errors import StaleWeights


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(trainer=TrainerConfig(save_checkpoint_path=str(tmp_path / "run")))


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that a run would have waited."""
    waited: list[float] = []
    monkeypatch.setattr(restarts_module.time, "sleep", waited.append)
    return waited


class Attempts:
    """Fails with these errors in turn, then ends well."""

    def __init__(self, *errors: Exception, begins: bool = True) -> None:
        self.errors, self.begins = [*errors], begins
        self.folders: list[RunFolder] = []
        self.closed = 0

    def __call__(self, folder: RunFolder, stack: ExitStack) -> RunEnd:
        stack.callback(self.close)
        self.folders.append(folder)
        if self.begins:
            assert folder.restarts is not None
            folder.restarts.begin()
        if self.errors:
            raise self.errors.pop(0)
        return RunEnd(0)

    def close(self) -> None:
        self.closed += 1


def test_a_run_starts_again_after_lost_processes_with_a_growing_delay(config: RunConfig, delays: list[float]) -> None:
    attempts = Attempts(ClusterError("learner-1 died"), HungError("gen hangs"), ClusterError("engine-0 died"))
    assert run_with_restarts(config, attempts) == RunEnd(0)
    assert attempts.closed == 4
    found = [one.restart for one in attempts.folders]
    assert [one and (one.number, one.cause) for one in found] == [
        None, (1, "learner-1 died"), (2, "gen hangs"), (3, "engine-0 died"),
    ]  # fmt: skip
    assert delays == [0.0, 10.0, 20.0]
    assert len({id(one.connection) for one in attempts.folders}) == 1, "Ray stays"
    assert all(one.restart is None or one.restart.phases.keys() == {"closed"} for one in attempts.folders)


def test_more_faults_than_max_restarts_within_the_window_end_a_run(config: RunConfig, delays: list[float]) -> None:
    errors = [ClusterError(f"fault {number}") for number in range(5)]
    attempts = Attempts(*errors)
    with pytest.raises(ClusterError, match="fault 3"):
        run_with_restarts(config, attempts)
    assert len(attempts.folders) == 1 + 3


def test_faults_before_the_window_do_not_count(config: RunConfig, delays: list[float]) -> None:
    run = config.trainer.checkpoint_folder
    counting, now = Restarts(config.trainer, run), time.time()
    counting.begin()
    found = [counting.allow("dead", "died", noticed=now + seconds) for seconds in (0, 1000, 2000, 3000, 3700, 7400)]
    assert [one and one.number for one in found] == [1, 2, 3, None, 3, 1]


@pytest.mark.parametrize("error", [ConfigError([Problem("trainer", "wrong")]), ValueError("own code")])
def test_an_error_of_the_user_is_raised_at_once(config: RunConfig, error: Exception) -> None:
    attempts = Attempts(error)
    with pytest.raises(type(error)):
        run_with_restarts(config, attempts)
    assert len(attempts.folders) == attempts.closed == 1


def test_a_run_that_never_trained_or_may_not_does_not_start_again(config: RunConfig) -> None:
    with pytest.raises(ClusterError, match="Ray has not started"):
        run_with_restarts(config, Attempts(ClusterError("Ray has not started"), begins=False))
    none = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_restarts": 0})})
    with pytest.raises(ClusterError, match="learner-1 died"):
        run_with_restarts(none, Attempts(ClusterError("learner-1 died")))


def test_an_engine_that_disagrees_twice_at_a_step_ends_the_run(
    config: RunConfig, delays: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = [StaleWeights("layer 1", "differs", version=1, seen="the bytes differ") for _ in range(2)]
    ended: list[str] = []
    monkeypatch.setattr(RayConnection, "end_kept", lambda self: ended.append("engines"))
    with pytest.raises(StaleWeights):
        run_with_restarts(config, Attempts(*stale))
    assert len(delays) == len(ended) == 1, "an engine that may be at fault is not used again"
    note_fault("an engine whose weights are not the learner's", outcome="restarted")


def test_a_restart_resumes_from_the_newest_checkpoint_of_this_command(config: RunConfig, tmp_path: Path) -> None:
    started = tmp_path / "other/global_step_10"
    for folder in (started, *(tmp_path / f"run/global_step_{step}" for step in (12, 20))):
        folder.mkdir(parents=True)
        (folder / "trainer.json").write_text('{"step": 10, "files": []}')
    store, began = CheckpointStore(config.trainer.checkpoint_folder), time.time() - 100
    os.utime(store.path(20) / "trainer.json", (0, 0))  # of an earlier run
    loads = config.model_copy(
        update={"trainer": config.trainer.model_copy(update={"load_checkpoint_path": str(started)})}
    )
    assert find_restart(loads, store, began) == store.path(12)
    assert find_restart(loads, store, time.time() + 100) == started


def test_a_restart_says_its_cause_and_what_was_lost(tmp_path: Path) -> None:
    start = tmp_path / "global_step_5"
    start.mkdir()
    (start / "trainer.json").touch()
    now = time.time()
    os.utime(start / "trainer.json", (now - 30, now - 30))
    restart = Restart(1, "learner-1 died", step=8, noticed=now - 12)
    entry = restart.describe(tmp_path, start, began=now - 500)
    assert (entry["step"], entry["steps_again"]) == (8, 2)
    assert entry["seconds_to_restart"] == pytest.approx(12, abs=2)
    assert entry["seconds_lost"] == pytest.approx(30, abs=2)
    assert Restart(1, "", 1, now).describe(tmp_path, None, now - 50)["seconds_lost"] == pytest.approx(50, abs=2)
    assert describe_restart(entry) == (
        "restart at step 8",
        f"learner-1 died; 2 steps taken again, {entry['seconds_lost']:,.0f} s lost",
    )


# --- the watchdog ----------------------------------------------------------------------------------------------------


def test_a_deadline_is_learned_from_the_phase_and_has_a_floor_and_a_ceiling() -> None:
    watchdog = Watchdog(ceiling=500.0)
    assert watchdog.deadline_of("sync") == 500.0
    for seconds, deadline in ((0.5, 60.0), (20.0, 200.0), (3.0, 200.0), (80.0, 500.0)):
        watchdog.begun("sync")
        watchdog.ended("sync", 0.0, seconds)
        assert watchdog.deadline_of("sync") == deadline
    assert watchdog.deadline_of("update_actor") == 500.0


def test_a_phase_that_asks_a_server_may_wait_as_long_as_a_request() -> None:
    watchdog = Watchdog()
    for phase in ("gen", "reward", "teacher"):
        watchdog.begun(phase)
        watchdog.ended(phase, 0.0, 0.5)
        assert watchdog.deadline_of(phase) > Patience().deadline


def test_a_phase_without_end_is_broken_off_with_its_stacks_and_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watchdog_module, "GRACE_SECONDS", 0.05)
    monkeypatch.setattr("r1_cli.faults.stacks.ANSWER_SECONDS", 0.0)
    watchdog = Watchdog(tmp_path, ceiling=0.1)
    watchdog.begin_step(7, lambda: [3, 1])
    done = threading.Event()
    for _ in range(100):  # faulthandler lists no more threads
        threading.Thread(target=done.wait, daemon=True).start()
    with watchdog.watching():
        watchdog.begun("step")
        watchdog.begun("reward")
        with pytest.raises(HungError, match="reward of step 7 did not end within 0 s; stacks are in"):
            time.sleep(60)
    [folder] = (tmp_path / "faults").iterdir()
    facts = json.loads((folder / "phase.json").read_text())
    assert (facts["phase"], facts["step"], facts["rows"]) == ("reward", 7, [3, 1])
    done.set()
    assert "test_a_phase_without_end" in (folder / "driver.txt").read_text()
    note_fault("a phase that does not end")


@pytest.mark.parametrize(("title", "breaks"), [("ray::learner-0", True), ("a reward worker", False)])
def test_a_process_that_stays_stopped_is_killed_and_one_that_goes_on_is_not(
    title: str, breaks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "STOPPED_LOOKS", 2)
    monkeypatch.setattr(watchdog_module, "title_of", lambda pid: title)
    monkeypatch.setattr("r1_cli.faults.stacks.ANSWER_SECONDS", 0.0)
    watchdog = Watchdog(tmp_path)
    with subprocess.Popen(["sleep", "600"]) as stopped:
        stopped.send_signal(signal.SIGSTOP)
        assert eventually(lambda: state_of(stopped.pid) == "T")
        watchdog.kill_stopped()
        stopped.send_signal(signal.SIGCONT)
        assert eventually(lambda: state_of(stopped.pid) == "S")
        watchdog.kill_stopped()
        stopped.send_signal(signal.SIGSTOP)
        assert eventually(lambda: state_of(stopped.pid) == "T")
        watchdog.kill_stopped()
        assert stopped.poll() is None
        watchdog.kill_stopped()
        assert stopped.wait(60) == -signal.SIGKILL
    told = f"{title}, process {stopped.pid}, was stopped"
    assert told in json.loads(next(tmp_path.glob("faults/*/phase.json")).read_text())["cause"]
    assert (told in (watchdog.take_cause() or "")) == breaks, "the next fault would be told with this cause"
    assert watchdog.take_cause() is None


STOPPED = """
import os, signal
REWARD_TYPE = "sequential"
def score(reward_input):
    if not os.path.exists(reward_input["ground_truth"]):
        open(reward_input["ground_truth"], "w").close()
        os.kill(os.getpid(), signal.SIGSTOP)
    return 0.5
"""


def test_a_stopped_reward_worker_is_killed_and_its_response_scored_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(watchdog_module, "STOPPED_LOOKS", 3)
    monkeypatch.setattr("r1_cli.faults.stacks.ANSWER_SECONDS", 0.0)
    (tmp_path / "reward.py").write_text(STOPPED)
    with load(f"{tmp_path}/reward.py:score", timeout=60.0) as verifier, Watchdog(tmp_path).guarding():
        [score] = verifier([RewardInput("a", str(tmp_path / "stopped"))])
    assert (score.value, score.error, (tmp_path / "stopped").exists()) == (0.5, None, True)
    note_fault("SIGSTOP of a reward worker", outcome="goes on")


def test_a_process_that_is_stopped_while_the_run_starts_is_killed(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog_module, "STOPPED_LOOKS", 2)
    monkeypatch.setattr(watchdog_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr("r1_cli.faults.stacks.ANSWER_SECONDS", 0.0)

    def attempt(folder: RunFolder, stack: ExitStack) -> RunEnd:
        with subprocess.Popen(["sleep", "600"]) as stopped:
            stopped.send_signal(signal.SIGSTOP)
            return RunEnd(stopped.wait(60))

    assert run_with_restarts(config, attempt) == RunEnd(-signal.SIGKILL)


# --- the process that starts the run ---------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
import r1_cli.faults.supervisor as supervisor

supervisor.SECOND, supervisor.STOPPED_SECONDS = 0.02, 3
supervisor.supervise()
folder, own = Path(sys.argv[2]), supervisor.supervised
assert "torch" not in sys.modules
tries = len(list(folder.iterdir()))
(folder / str(tries)).write_text(f"{os.getpid()} {own.death}")
if sys.argv[1] != "early" and (sys.argv[1] not in ("again", "hopeless") or tries == 0):
    own.arm()
if sys.argv[1] == "disarmed":
    own.arm(False)
if tries < 2 or sys.argv[1] == "hopeless":
    if sys.argv[1] == "orphan":
        os.fork() or time.sleep(600)
    if sys.argv[1] in ("dies", "early", "orphan", "disarmed", "again", "hopeless"):
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
if sys.argv[1] == "waits":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "ready").touch()
    time.sleep(600)
sys.exit(7)
"""


def run(how: str, folder: Path) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", PROGRAM, how, str(folder)])


@pytest.mark.parametrize("how", ["dies", "orphan", "stops", "again"])
def test_a_killed_or_stopped_run_is_started_again_and_nothing_of_it_is_left(how: str, tmp_path: Path) -> None:
    with run(how, tmp_path) as process:
        assert process.wait(60) == 7
    told = [(tmp_path / str(number)).read_text().partition(" ")[2] for number in range(3)]
    assert told[0] == "None"
    assert all(("was stopped" if how == "stops" else "was killed by SIGKILL") in one for one in told[1:])
    pids = [int((tmp_path / str(number)).read_text().split()[0]) for number in range(3)]
    assert not any(map(state_of, pids))
    if how == "stops":
        note_fault("SIGSTOP of the driver")


@pytest.mark.parametrize("how", ["early", "disarmed"])
def test_a_run_that_is_killed_before_it_trains_or_after_a_signal_ends_as_it_did(how: str, tmp_path: Path) -> None:
    with run(how, tmp_path) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 1


def test_a_run_that_is_killed_at_each_start_ends_at_last(tmp_path: Path) -> None:
    with run("hopeless", tmp_path) as process:
        assert process.wait(60) == -signal.SIGKILL
    assert len([*tmp_path.iterdir()]) == 1 + EARLY_DEATHS + 1
    note_fault("SIGKILL of the driver at every start", outcome="ends")


def test_a_signal_is_passed_on_and_its_exit_code_returned(tmp_path: Path) -> None:
    with run("waits", tmp_path) as process:
        assert eventually((tmp_path / "ready").exists)
        process.terminate()
        assert process.wait(60) == 143


def test_a_run_dies_with_the_process_that_watches_it(tmp_path: Path) -> None:
    with run("waits", tmp_path) as process:
        assert eventually((tmp_path / "ready").exists)
        [child] = descendants_of(process.pid)
        process.kill()
        assert eventually(lambda: state_of(child) in ("", "Z"))
    note_fault("SIGKILL of `r1` itself", outcome="ends")


def test_no_end_that_a_user_asks_for_starts_a_run_again() -> None:
    assert not {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT} & {*FATAL}
    assert supervised.death is None
