"""Agents of smolagents and openai-agents train a step of a real model. `.ci/run` has their packages."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log

from r1_cli.runs.reader import RunReader

pytestmark = pytest.mark.slow

SMOLAGENTS = '''
from smolagents import EMPTY_PROMPT_TEMPLATES, OpenAIModel, ToolCallingAgent, tool

TEMPLATES = {**EMPTY_PROMPT_TEMPLATES, "system_prompt": "You add."}


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


def solve(row, base_url, api_key):
    model = OpenAIModel("policy", api_base=base_url, api_key=api_key, tool_choice="auto", temperature=0.2)
    agent = ToolCallingAgent([add], model, prompt_templates=TEMPLATES, max_steps=2, verbosity_level=0)
    return float(len(agent.run("Add 2 and 3.")) % 2)
'''
OPENAI_AGENTS = '''
import agents

agents.set_tracing_disabled(True)


@agents.function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def solve(row, client):
    model = agents.OpenAIChatCompletionsModel("policy", client)
    agent = agents.Agent("adder", instructions="Add.", tools=[add], model=model)
    first = await agents.Runner.run(agent, "Add 2 and 3.")
    second = await agents.Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "Sure?"}])
    return float(len(second.final_output) % 2)
'''
# smolagents ends with a request of its own for the answer, with another history: a fork.
AGENTS = [
    pytest.param("smolagents", SMOLAGENTS, 3, 1, id="smolagents"),
    pytest.param("agents", OPENAI_AGENTS, 2, 0, id="openai-agents"),
]


def copy_model(folder: Path) -> Path:
    """Copy the quickstart's model with room for schemas of tools, in which it has a token for each letter."""
    shutil.copytree(ROOT / "examples/quickstart/model", folder)
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("package", "agent", "turns", "forks"), AGENTS)
def test_an_agent_of_a_framework_trains_a_step(
    package: str, agent: str, turns: int, forks: int, tmp_path: Path, r1: R1
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs {package}: see .ci/run")
    file, run = tmp_path / "agent.py", tmp_path / "run"
    file.write_text(agent)
    words = [
        "train", QUICKSTART, *SMALL, f"trainer.save_checkpoint_path={run}", "trainer.max_steps=1",
        "data.rollout_batch_size=2", "worker.rollout.multi_turn.enable=true",
        f"worker.rollout.multi_turn.agent={file}:solve", "worker.rollout.multi_turn.max_turn_tokens=16",
        f"worker.actor.model.model_path={copy_model(tmp_path / 'model')}", "data.max_prompt_length=4096",
        "data.max_response_length=1024", "trainer.val_before_train=false", "trainer.val_freq=-1",
    ]  # fmt: skip
    assert r1(*words).exit_code == 0
    (log,) = read_log(run)
    assert log["reward/failures"] == 0
    assert log["episode/turns/mean"] == turns
    assert log["episode/forks"] == forks
    assert log["actor/grad_norm"] > 0
    rows = pq.read_table(RunReader(run).sample_path(1)).to_pylist()
    assert len(rows) == 8 * (1 + forks)
    for row in rows:
        gaps = [abs(a - b) for a, b in zip(row["old_logprobs"], row["rollout_logprobs"], strict=True)]
        assert max(gaps) < 1e-4
        assert any(row["sampled"])
