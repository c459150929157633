"""A stranger's way: from a clone to a trained model of their own that answers, in at most twelve commands."""

import importlib.util
import sys
from pathlib import Path

import pytest
from endtoend import ROOT

spec = importlib.util.spec_from_file_location("first_hour", ROOT / "benchmarks/first_hour.py")
assert spec is not None
assert spec.loader is not None
first_hour = importlib.util.module_from_spec(spec)
spec.loader.exec_module(first_hour)


@pytest.mark.slow
def test_a_stranger_reaches_a_model_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two steps of the quickstart in place of 140, in this environment, which runs the sources of this tree."""
    monkeypatch.setenv("UV_PROJECT_ENVIRONMENT", sys.prefix)
    monkeypatch.setenv("UV_NO_SYNC", "1")
    monkeypatch.setattr(first_hour, "read_commands", lambda: [one.replace("step_140", "step_2") for one in COMMANDS])
    done = first_hour.walk(tmp_path, ["trainer.max_steps=2"])
    assert [command for command, *_ in done] == [one.replace("step_140", "step_2") for one in COMMANDS]
    assert (tmp_path / "r1/my-model/README.md").is_file()


COMMANDS = first_hour.read_commands()


def test_the_way_has_at_most_twelve_commands_from_clone_to_chat() -> None:
    assert len(COMMANDS) <= first_hour.MOST == 12
    parts = ("git clone", "r1 train examples", "r1 init", "r1 train my-task", "r1 view", "r1 merge", "r1 chat")
    places = [next(place for place, command in enumerate(COMMANDS) if part in command) for part in parts]
    assert places == sorted(places)
    assert "--lora" in next(command for command in COMMANDS if "r1 init" in command)
