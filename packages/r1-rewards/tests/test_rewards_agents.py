"""Agents in processes of their own: functions and commands, what they get, and how they end."""

import json
import sys
from pathlib import Path

import pytest
from environment_files import write
from faults_table import note_fault
from patience import ended, eventually

from r1_rewards.environments.pool import EnvironmentPool
from r1_rewards.environments.types import EnvironmentSetup, EnvironmentSpecError, StepResult
from r1_rewards.types import Failure, Score

ADDRESS = {"base_url": "http://127.0.0.1:9/sessions/s/v1", "api_key": "secret"}
AGENTS = """
import os

def solve(row, client):
    assert str(client.base_url).rstrip("/") == os.environ["OPENAI_BASE_URL"], client
    assert client.api_key == os.environ["OPENAI_API_KEY"] and "127.0.0.1" in os.environ["NO_PROXY"]
    if row["answer"] == "nothing":
        return None
    if row["answer"] == "raise":
        raise KeyError("lost")
    return {"overall": float(row["answer"]), "speed": 0.5}

async def other_names(task, llm, base_url, limit=3):
    return float(len(base_url) + limit + int(task["answer"])) if llm.api_key else None

def too_many(a, b, c): ...
"""
COMMAND = """
import json, os, subprocess, sys, time
row = json.loads(os.environ["R1_ROW"])
print("x" * 10_000_000)
if row["answer"] == "hang":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    open(sys.argv[1], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
names = [f"{vendor}_{name}" for vendor in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY")]
open(sys.argv[1], "w").write(json.dumps([row, *map(os.environ.get, [*names, "WANDB_API_KEY"])]))
sys.exit("the end" if row["answer"] == "fail" else 0)
"""


def open_pool(agent: str, **limits: float) -> EnvironmentPool:
    return EnvironmentPool(EnvironmentSetup(agent=agent, **{"episode_timeout": 20.0, **limits}), workers=2)


def run(pool: EnvironmentPool, *answers: str) -> list[StepResult | Score | Failure]:
    for number, answer in enumerate(answers):
        pool.start(str(number), {"answer": answer}, address=ADDRESS)
    found = {}
    while len(found) < len(answers):
        found |= dict(pool.poll())
    for key, answer in found.items():
        if isinstance(answer, StepResult):
            pool.finish(key)
    return [found[str(number)] for number in range(len(answers))]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write(tmp_path_factory.mktemp("agents"), AGENTS)


def test_a_function_gets_the_row_and_a_client_and_its_return_value_is_the_score(file):
    with open_pool(f"{file}:solve") as pool:
        scored, plain, failed = run(pool, "0.25", "nothing", "raise")
        assert run(pool, "3") == [Score(3.0, {"overall": 3.0, "speed": 0.5})]  # the keys are free again
    assert scored == Score(0.25, {"overall": 0.25, "speed": 0.5})
    assert isinstance(plain, StepResult)
    assert not plain.messages
    assert isinstance(failed, Failure)
    assert failed.message.startswith("the agent failed: KeyError: 'lost'")
    assert "line 10" in failed.message


def test_parameters_of_other_names_are_the_row_and_the_client_in_order(file):
    with open_pool(f"{file}:other_names") as pool:
        assert run(pool, "4") == [Score(len(ADDRESS["base_url"]) + 7.0, {"overall": len(ADDRESS["base_url"]) + 7.0})]


def test_a_command_gets_the_row_and_the_address_in_its_environment_and_no_secret_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "planted")
    program = tmp_path / "my agent.py"
    program.write_text(COMMAND)
    told = tmp_path / "told"
    with open_pool(f"{sys.executable} '{program}' {told}") as pool:
        (answer,) = run(pool, "fine")
        assert isinstance(answer, StepResult)
        row, *address, hidden = json.loads(told.read_text())
        assert hidden is None
        assert row == {"answer": "fine"}
        assert address == [ADDRESS["base_url"], "secret", "http://127.0.0.1:9/sessions/s", "secret"]
        (answer,) = run(pool, "fail")
    assert answer == Failure("exception", "the agent failed: AgentError: exit code 1: the end")


@pytest.mark.slow
def test_an_agent_that_never_ends_is_killed_with_what_it_started(tmp_path):
    program, told = tmp_path / "agent.py", tmp_path / "pids"
    program.write_text(COMMAND)
    with open_pool(f"{sys.executable} {program} {told}", episode_timeout=2.0) as pool:
        (answer,) = run(pool, "hang")
        assert isinstance(answer, Failure)
        assert answer.cause == "timeout"
        pids = [int(pid) for pid in told.read_text().split()]
        assert eventually(lambda: all(ended(pid) for pid in pids))
    note_fault("an agent's program that never ends", outcome="goes on")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("{file}:solved", "has no function 'solved'"),
        ("{file}:too_many", "'c' has no value"),
        ("missing.py:solve", "there is no file"),
        ("python 'x", "cannot be split"),
    ],
)
def test_what_is_no_agent_is_refused_at_the_start(file, agent, message):
    with pytest.raises(EnvironmentSpecError, match=message):
        open_pool(agent.format(file=file))


def test_a_command_that_cannot_run_fails_its_episode(tmp_path: Path):
    with open_pool("no-such-command-anywhere --fast") as pool:
        assert run(pool, "1")[0].message.endswith(
            "no-such-command-anywhere cannot be started: No such file or directory"
        )
        pool.start("big", {"answer": "x" * 130_000}, address=ADDRESS)
        assert "too many for R1_ROW" in dict(pool.poll())["big"].message
