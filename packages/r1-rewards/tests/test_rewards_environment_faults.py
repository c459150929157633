"""Faults of tools and environments, each in a real process: no episode is lost, and no process is left."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from environment_files import TOOLS, answer, call, open_pool, opened, say, write
from faults_table import note_fault
from patience import ended, eventually, growing

from r1_rewards.environments.types import PolicyTurn, StepResult, ToolCall
from r1_rewards.types import Failure, Score

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tools"), TOOLS)


@pytest.fixture(scope="module")
def tools(tools_file):
    names = ("dies", "segfault", "forks", "long", "hoard", "add")
    with open_pool(*(f"{tools_file}:{name}" for name in names), memory_mib=256) as pool:
        opened(pool)
        yield pool


@pytest.mark.parametrize(
    ("name", "cause", "content"),
    [
        ("dies", "crash", "error: the worker process exited with code 3"),
        ("segfault", "crash", "error: the worker process was killed by SIGSEGV"),
        ("hoard", "out_of_memory", "error: MemoryError"),
        ("forks", "", "forked"),
    ],
)
def test_a_tool_that_ends_its_process_costs_its_call_only(tools, name, cause, content):
    record, found = call(tools, name)
    assert (record.cause, found) == (cause, content)
    for number in range(3):
        assert call(tools, "add", a=number)[1] == str(number + 2)
        time.sleep(0.02)  # for a second answer of a forked process to arrive


def test_a_hundred_megabytes_of_text_are_shortened_in_the_worker(tools):
    record, content = call(tools, "long", size=100_000_000)
    assert len(content) < 5000
    assert record.truncated == 100_000_000 - tools.setup.max_response_length


@pytest.mark.parametrize("name", ["hangs", "spins"])
def test_a_tool_that_hangs_is_killed_and_the_episode_goes_on(tools_file, name):
    with open_pool(f"{tools_file}:{name}", f"{tools_file}:add", tool_timeout=0.4) as pool:
        opened(pool)
        record, content = call(pool, name)
        assert (record.cause, content) == ("timeout", "error: no result after 0.4 s")
        assert record.seconds >= 0.4
        assert len(pool.pids()) == 1  # the fork server
        assert call(pool, "add", a=1)[1] == "3"
    note_fault("a tool that hangs", outcome="goes on")


def test_what_a_hanging_tool_started_dies_with_it(tools_file, tmp_path):
    def hang(seconds):
        pids = tmp_path / f"pids-{seconds}"
        with open_pool(f"{tools_file}:stubborn", tool_timeout=seconds) as pool:
            opened(pool)
            assert call(pool, "stubborn", file=str(pids))[0].cause == "timeout"
            return pids.exists() and all(eventually(lambda pid=pid: ended(pid)) for pid in pids.read_text().split())

    assert growing(hang, bool, (0.5, 5.0, 30.0))


STATE = """
import os, signal, subprocess, time
CALLS = []
class Counting:
    deterministic = DETERMINISTIC
    def reset(self, **row):
        self.row, self.seen = row, []
        if row.get("fault") == "reset": raise RuntimeError("no reset")
        if row.get("fault") == "hang in reset": time.sleep(600)
    def count(self, word: str):
        self.seen.append(word)
        CALLS.append(word)
        return f"{self.seen} {len(CALLS)}"
    def die(self): os._exit(5)
    def hang(self): time.sleep(600)
    def hang_with(self, file: str):
        child = subprocess.Popen(["sleep", "600"])
        with open(file + "_", "w") as pids: pids.write(str(child.pid))
        os.rename(file + "_", file)
        time.sleep(600)
    def random(self): return str(os.getpid())
    def die_once(self, file: str):
        if not os.path.exists(file):
            open(file, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.count("survived")
    def get_reward(self):
        if self.row.get("fault") == "score": raise RuntimeError("no score")
        if self.row.get("fault") == "nan": return float("nan")
        if self.row.get("fault") == "text": return "good"
        return len(self.seen)
"""


def counting(folder, *, deterministic=False, **limits):
    source = STATE.replace("DETERMINISTIC", str(deterministic))
    return open_pool(environment=f"{write(folder, source)}:Counting", **limits)


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        ("score", "exception", "score() failed: RuntimeError: no score (line {line} of environment.py)"),
        ("nan", "non_finite", "'overall' is nan"),
        ("text", "wrong_shape", "'overall' is 'good', not a number"),
    ],
)
def test_a_score_that_fails_is_a_failure(tmp_path, fault, cause, message):
    line = next(number for number, text in enumerate(STATE.splitlines(), 1) if "no score" in text)
    with counting(tmp_path) as pool:
        opened(pool, {"fault": fault})
        pool.finish("e")
        assert answer(pool) == Failure(cause, message.format(line=line))


def test_a_reset_that_fails_or_hangs_is_a_failure(tmp_path):
    with counting(tmp_path, tool_timeout=0.4) as pool:
        assert opened(pool, {"fault": "reset"}).message.startswith("reset() failed: RuntimeError: no reset")
        assert opened(pool, {"fault": "hang in reset"}) == Failure("timeout", "reset(): no result after 0.4 s")
        assert opened(pool) == StepResult()


def test_environments_share_no_globals(tmp_path):
    with counting(tmp_path, workers=2) as pool:
        for key in "abc":
            opened(pool, key=key)
        for number in range(1, 4):
            for key in "abc":
                content = call(pool, "count", key, word=key)[1]
                assert content == f"{[key] * number} {number}"


@pytest.mark.parametrize(("name", "cause"), [("die", "crash"), ("hang", "timeout")])
def test_an_environment_whose_process_ends_is_lost_with_its_state(tmp_path, name, cause):
    with counting(tmp_path, tool_timeout=0.4) as pool:
        opened(pool)
        call(pool, "count", word="a")
        pool.step("e", PolicyTurn("", (ToolCall(name),)))
        failure = answer(pool)
        assert (failure.cause, failure.message.startswith(f"{name}(): ")) == (cause, True)
        with pytest.raises(KeyError):
            pool.finish("e")
    note_fault("an environment whose process ends or hangs", outcome="goes on")


def test_a_deterministic_environment_is_played_again(tmp_path):
    with counting(tmp_path, deterministic=True, tool_timeout=1.0) as pool:
        opened(pool, {"x": 1})
        assert call(pool, "count", word="a")[1] == "['a'] 1"
        assert call(pool, "hang")[1] == "error: no result after 1 s"
        assert call(pool, "count", word="b")[1] == "['a', 'b'] 2"
        assert call(pool, "die")[1] == "error: the worker process exited with code 5"
        calls = (ToolCall("count", {"word": "c"}), ToolCall("die"), ToolCall("count", {"word": "d"}))
        pool.step("e", PolicyTurn("", calls))
        contents = [message["content"] for message in answer(pool).messages]
        assert contents == ["['a', 'b', 'c'] 3", "error: the worker process exited with code 5", str([*"abcd"]) + " 4"]
        assert call(pool, "die_once", file=str(tmp_path / "x"))[1] == "['a', 'b', 'c', 'd', 'survived'] 5"
        pool.finish("e")
        assert answer(pool).value == 5.0


def test_an_environment_that_is_not_deterministic_after_all_is_found_out(tmp_path):
    with counting(tmp_path, deterministic=True) as pool:
        opened(pool)
        call(pool, "random")
        pool.step("e", PolicyTurn("", (ToolCall("die"),)))
        assert "played again it answered differently" in answer(pool).message


def test_an_episode_ends_at_its_time_limit_whatever_it_does(tmp_path):
    with counting(tmp_path, episode_timeout=0.5) as pool:
        opened(pool)
        assert answer(pool) == Failure("timeout", "the episode took longer than 0.5 s")
        opened(pool)
        pool.step("e", PolicyTurn("", (ToolCall("hang"),)))
        assert answer(pool).cause == "timeout"
        assert eventually(lambda: len(pool.pids()) == 1)


def test_a_cancelled_episode_answers_nothing_and_its_process_ends(tmp_path):
    with counting(tmp_path) as pool:
        opened(pool)
        pool.step("e", PolicyTurn("", (ToolCall("hang"),)))
        pool.cancel("e")
        pool.cancel("e")
        assert pool.poll() == []
        assert eventually(lambda: len(pool.pids()) == 1)
        opened(pool)
        assert call(pool, "count", word="a")[1] == "['a'] 1"
        pool.cancel("e")
        assert eventually(lambda: len(pool.pids()) == 1)


def test_close_ends_everything_while_calls_hang(tmp_path):
    pool = counting(tmp_path, workers=3)
    for key in "abcdef":
        opened(pool, key=key)
        pool.step(key, PolicyTurn("", (ToolCall("hang"),)))
    pids = pool.pids()
    assert len(pids) == 7
    pool.close()
    assert all(eventually(lambda pid=pid: ended(pid)) for pid in pids)
    pool.close()


CLOSING = """
class Env:
    def reset(self, file): self.file = file
    def step(self, text): return text
    def close(self): open(self.file, "w").close()
"""


def test_close_of_an_environment_is_called_however_the_episode_ends(tmp_path):
    with open_pool(environment=f"{write(tmp_path, CLOSING)}:Env") as pool:
        for key, end in (("a", pool.finish), ("b", pool.cancel)):
            file = tmp_path / key
            opened(pool, {"file": str(file)}, key=key)
            end(key)
            assert eventually(file.exists)
        assert eventually(lambda: len(pool.pids()) == 1)


DRIVER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from environment_files import open_pool, opened
from r1_rewards.environments.types import PolicyTurn, ToolCall
pool = open_pool(environment=sys.argv[2])
for key in "abc":
    opened(pool, key=key)
pool.step("a", PolicyTurn("", (ToolCall("hang_with", {"file": sys.argv[3]}),)))
while not os.path.exists(sys.argv[3]): time.sleep(0.02)
print(*pool.pids(), open(sys.argv[3]).read(), flush=True)
time.sleep(600)
"""


def test_workers_end_when_the_caller_is_killed(tmp_path):
    path = write(tmp_path, STATE.replace("DETERMINISTIC", "False"))
    command = [sys.executable, "-c", DRIVER, str(Path(__file__).parent), f"{path}:Counting", str(tmp_path / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        pids = driver.stdout.readline().split()
        assert len(pids) == 5  # the fork server, an environment for each episode, and what one has started
        os.kill(driver.pid, signal.SIGKILL)
    assert all(eventually(lambda pid=pid: ended(pid)) for pid in pids)


PICTURES = """
import io
from PIL import Image
def picture(kind: str):
    red = Image.new("RGB", (4, 4))
    return {
        "large": Image.new("1", (20_000, 20_000)), "narrow": Image.new("L", (20_000, 2)),
        "empty": Image.new("L", (0, 5)),
        "nothing": [{"type": "image", "image": b""}], "many": [red] * 5000, "url": [{"type": "image_url", "image_url": {
        "url": "http://example.org/a.png"}}], "half": [{"type": "image", "image": "data:image/png;base64,!!"}],
        "bomb": [{"type": "image", "image": packed(Image.new("1", (20_000, 20_000)))}],
    }[kind]
def packed(picture):
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()
"""


PICTURE_ERRORS = {
    "large": "20000x20000 pixels is over the limit",
    "narrow": "20000x2 pixels is too narrow",
    "empty": "0x5 pixels is empty",
    "nothing": "bytes cannot be read",
    "many": "5000 parts, more than 256",
    "url": "a PIL image, bytes of a file, or a data URL",
    "half": "data URL is not base64",
    "bomb": "bytes hold more pixels than the limit of",
}


def test_pictures_that_no_processor_takes_become_an_error_text(tmp_path):
    with open_pool(write(tmp_path, PICTURES)) as pool:
        opened(pool)
        for kind, message in PICTURE_ERRORS.items():
            record, content = call(pool, "picture", kind=kind)
            assert message in content
            assert record.cause == "wrong_shape"


FAULTY = """
import os, signal, sys, time, threading
class Faulty:
    def reset(self, fault):
        self.fault, self.turns = fault, 0
        self.act("reset")
    def step(self, text):
        self.turns += 1
        return self.act("step") or (None if self.turns > 2 else f"turn {self.turns}")
    def score(self):
        return self.act("score") or float(self.turns)
    def act(self, place):
        fault, _, where = self.fault.partition(" in ")
        if where != place: return None
        if fault == "raise": raise ValueError("\\ud800 \\0")
        if fault == "exit": sys.exit(1)
        if fault == "die": os._exit(1)
        if fault == "segfault": os.kill(os.getpid(), signal.SIGSEGV)
        if fault == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang": time.sleep(600)
        if fault == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "fork": os.fork()
        if fault == "daemon" and os.fork() == 0:
            os.setsid(); time.sleep(600)
        if fault == "thread": threading.Thread(target=time.sleep, args=(600,)).start()
        if fault == "close": os.closerange(3, 64)
        if fault == "garbage": os.write(int(sorted(os.listdir("/proc/self/fd"), key=int)[3]), b"garbage" * 100)
        if fault == "object": return object()
        if fault == "nan": return ("x", float("nan"), False) if place == "step" else float("nan")
        if fault == "long" and self.turns == 1 and place == "step": return "x" * 10_000_000
"""


def play_faulty(spec, faults, seconds):
    """Play an episode per fault, and return how each ended."""
    outcomes = dict[str, Score | Failure]()
    with open_pool(environment=spec, workers=4, tool_timeout=seconds) as pool:
        for index, fault in enumerate(faults):
            pool.start(str(index), {"fault": fault})
        while len(outcomes) < len(faults):
            found = pool.poll(300.0)
            assert found, f"{len(faults) - len(outcomes)} episodes are lost"
            for key, result in found:
                if not isinstance(result, StepResult):
                    outcomes[key] = result
                elif result.done:
                    pool.finish(key)
                else:
                    pool.step(key, PolicyTurn("x"))
        assert eventually(lambda: len(pool.pids()) == 1)
    return [outcomes[str(index)] for index in range(len(faults))]


def is_harmless(fault):
    harmless = fault.startswith(("fork", "daemon", "thread", "long", "none"))
    return harmless or fault in ("object in reset", "nan in reset")


def test_hundreds_of_faulty_environments_and_none_is_lost(tmp_path):
    names = ["raise", "exit", "die", "segfault", "kill", "hang", "stop", "fork", "daemon", "thread", "close"]
    names += ["garbage", "object", "nan", "long", "none"]
    faults = [f"{name} in {place}" for name in names for place in ("reset", "step", "score")] * 7
    random.Random(0).shuffle(faults)
    spec = f"{write(tmp_path, FAULTY)}:Faulty"

    def harmless_ones_score(outcomes):
        values = [one.value if isinstance(one, Score) else one for one in outcomes]
        return {value for value, fault in zip(values, faults, strict=True) if is_harmless(fault)} == {3.0}

    # A busy machine may keep a harmless one waiting for so long that it is taken for one that hangs.
    outcomes = growing(lambda seconds: play_faulty(spec, faults, seconds), harmless_ones_score, (1.0, 10.0))
    assert harmless_ones_score(outcomes)
    failed = [one for one, fault in zip(outcomes, faults, strict=True) if not is_harmless(fault)]
    assert all(isinstance(one, Failure) for one in failed)
    assert {one.cause for one in failed} == {"exception", "crash", "timeout", "wrong_shape", "non_finite"}


THREAD = """
import threading, time, asyncio
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
class Env:
    async def reset(self, row):
        self.event = asyncio.Event()
    async def step(self, text):
        if text == "hang": await self.event.wait()
        return "" if text == "quiet" else text
"""


def test_a_file_that_starts_a_thread_has_a_process_for_each_episode(tmp_path):
    with open_pool(environment=f"{write(tmp_path, THREAD)}:Env", tool_timeout=1.0) as pool:
        for key in "ab":
            opened(pool, key=key)
        assert len(pool.pids()) == 2
        assert say(pool, "x", "a").messages == ({"role": "user", "content": "x"},)
        assert say(pool, "hang", "b").cause == "timeout"
        assert say(pool, "quiet", "a").messages == ({"role": "user", "content": ""},)


STOPPED = """
import os, signal, threading, time
def stop():
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    return "stops"
def look(*, row): return str(len(row["text"]))
"""


def test_a_worker_that_stops_while_it_is_idle_holds_nobody_up(tmp_path):
    with open_pool(write(tmp_path, STOPPED), tool_timeout=1.0) as pool:
        opened(pool, {"text": "x" * 5_000_000})
        assert call(pool, "stop")[1] == "stops"
        time.sleep(0.3)
        begin = time.monotonic()
        assert call(pool, "look")[1] == "5000000"
        assert time.monotonic() - begin < 20
    note_fault("SIGSTOP of an idle worker of tools", outcome="goes on")
