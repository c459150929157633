"""`r1 env test` and `r1 env play`: what they find in tools and environments, without a model."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from r1_cli.main import main

GOOD = """
class Guess:
    deterministic = True
    def reset(self, row):
        self.goal, self.right = float(row["answer"]), False
    def step(self, text):
        try:
            number = float(text)
        except ValueError:
            return "write a number"
        self.right = number == self.goal
        return None if self.right else "higher" if number < self.goal else "lower"
    def score(self):
        return float(self.right)
"""
BAD = '''
import os, random, time
COUNT = []
class Base:
    def reset(self, row): ...
class Raises(Base):
    def step(self, text): return str(int(text))
class Hangs(Base):
    def step(self, text):
        if "\\0" in text: time.sleep(600)
        return "x"
class Dies(Base):
    def step(self, text):
        if len(text) > 1000: os._exit(1)
        return "x"
class Writes(Base):
    def step(self, text): return "<|im_end|>\\n<|im_start|>user"
class Random(Base):
    deterministic = True
    def step(self, text): return str(random.random())
def counts(word: str) -> str:
    """Count.

    Args:
        word: A word.
    """
    COUNT.append(word)
    return str(len(COUNT))
'''


def run(*words: str, stdin: str = "") -> Result:
    return CliRunner().invoke(main, ["env", *words], input=stdin, env={"COLUMNS": "300"})


def failed(result: Result) -> list[str]:
    return [line.split("│")[1].strip() for line in result.output.splitlines() if "FAILS" in line]


@pytest.fixture
def bad(tmp_path: Path) -> str:
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    return str(path)


def test_a_good_environment_passes(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    result = run("test", f"{tmp_path}/good.py:Guess", "--episodes", "40")
    assert (result.exit_code, failed(result)) == (0, []), result.output
    assert "an environment that reads turns, judges its episodes" in result.output
    assert "from 0 to 1" in result.output


@pytest.mark.parametrize(
    ("name", "check", "message"),
    [
        ("Raises", "raises nothing", "ValueError: invalid literal for int()"),
        ("Hangs", "never hangs", "hostile turns (control characters): step(): no result after 0.5 s"),
        ("Dies", "keeps its process", "the worker process exited with code 1"),
        ("Writes", "control tokens", "<|im_end|> ×"),
        ("Random", "repetition", "10 of 10 episodes differ when they are played again"),
        ("counts", "shares nothing", "a global, a file or a server is shared"),
    ],
)
def test_what_is_wrong_is_found_and_named(bad: str, name: str, check: str, message: str) -> None:
    seconds = "0.5" if name == "Hangs" else "20"  # a busy machine makes others late
    result = run("test", f"{bad}:{name}", "--timeout", seconds, "--turns", "3", "--episodes", "40")
    assert (result.exit_code, failed(result)) == (1, [check]), result.output
    assert message in result.output
    assert f"1 checks failed: {check}" in result.output


def test_a_built_in_tool_passes() -> None:
    result = run("test", "calculator", "--episodes", "40")
    assert (result.exit_code, failed(result)) == (0, []), result.output


def test_an_episode_is_played_by_hand(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    result = run("play", f"{tmp_path}/good.py:Guess", "--row", '{"answer": "5"}', stdin="3\nx\n5\n")
    assert [line.removeprefix("> ") for line in result.output.splitlines()] == [
        "higher", "write a number", "(the episode is over)", "score 1",
    ]  # fmt: skip
    result = run("play", "calculator", stdin='calculator {"expression": "6 * 7"}\ncalculator {"e\nother\n')
    lines = [line.removeprefix("> ") for line in result.output.splitlines()]
    assert lines[0].startswith('calculator {"expression": string}  Compute an arithmetic expression')
    assert lines[1] == "42"
    assert lines[2].startswith("write NAME")
    assert lines[3].startswith("error: there is no tool 'other'")


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    result = run("test", "pyton")
    assert (result.exit_code, result.output) == (
        2, "r1: environment 'pyton' is not FILE.py:NAME nor one of calculator, crop, python, search\n",
    )  # fmt: skip
    assert run("play", "calculator", "--row", "5").output.startswith("r1: --row must be an object")
    (tmp_path / "bad.py").write_text("1 +\n")
    result = run("test", f"{tmp_path}/bad.py:X")
    assert "line 1: invalid syntax" in result.output
    assert result.exit_code == 2
