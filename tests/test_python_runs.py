"""`r1_cli.open_run` on the quickstart: byte for byte the run of the command, also if it is stopped and opened again."""

import asyncio
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endtoend import QUICKSTART, R1, ROOT, SMALL, read_log, without_clock

import r1_cli
from r1_cli.runs.reader import RunReader
from r1_rollout.embedded.stack import Stack

pytestmark = pytest.mark.slow
WORDS = [*SMALL, "trainer.max_steps=3", "trainer.save_freq=2", "trainer.val_freq=2"]


def close_over(note: str) -> Callable[..., Any]:
    """Return the quickstart's reward as a function that only this process can call."""
    spec = importlib.util.spec_from_file_location("quickstart_reward", ROOT / "examples/quickstart/reward.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def reward(reward_inputs: list[dict[str, object]]) -> object:
        assert note
        return module.compute_score(reward_inputs)

    return reward


def contents(folder: Path) -> dict[str, bytes]:
    """Return what equal runs write alike, by path: checkpoints, samples, media and generations."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".json", ".jsonl", ".py")]
    files += [*folder.glob("global_step_*/**/*.json"), folder / "generations.jsonl"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_run_of_python_that_is_stopped_and_opened_again_is_the_commands_byte_for_byte(
    tmp_path: Path, r1: R1, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reward is a closure, and an event loop runs, as in a notebook. The engine decodes by its own decoder."""
    command, python = tmp_path / "command", tmp_path / "python"
    r1("train", QUICKSTART, *WORDS, f"trainer.save_checkpoint_path={command}")
    capfd.readouterr()
    means: list[float] = []
    decoded: list[int] = []  # rows of each step of the engine's own decoder
    decode = Stack.step
    monkeypatch.setattr(
        Stack, "step", lambda stack, tokens, *others: (decoded.append(len(tokens)), decode(stack, tokens, *others))[1]
    )

    async def train(reward: Any, last: int, *, quiet: bool) -> None:
        place = f"trainer.save_checkpoint_path={python}"
        with r1_cli.open_run(QUICKSTART, *WORDS, place, reward=reward, quiet=quiet) as run:
            for step in run:
                means.append(sum(one.reward for group in step.groups for one in group.responses) / 16)
                assert step.metrics["reward/overall"] == pytest.approx(means[-1])
                assert 16 in decoded
                decoded.clear()
                print("the program's own line")
                if step.number == last:
                    run.stop()

    with monkeypatch.context() as terminal:
        terminal.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
        asyncio.run(train(close_over("first"), 1, quiet=True))
    assert capfd.readouterr() == ("the program's own line\n", "")
    asyncio.run(train(close_over("second"), 3, quiet=False))
    told = capfd.readouterr().out
    assert f"resuming from {python}/global_step_1" in told
    assert f"the code of {python}/code/reward/reward.py:reward has changed since the last start" in told
    assert [one["end"] for one in RunReader(python).starts()] == ["left after step 1, by the program", "complete"]
    assert without_clock(read_log(command)) == without_clock(read_log(python))
    ours, theirs = contents(python), contents(command)
    ours = {name: content for name, content in ours.items() if not name.startswith("global_step_1/")}
    assert len(theirs) > 20
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name] != theirs[name]]
    assert len(means) == 3
