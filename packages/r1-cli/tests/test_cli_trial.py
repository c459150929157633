"""`r1 reward test`: what it finds in good, sloppy and dangerous rewards, and the exit code that says so."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from r1_cli.main import main
from r1_cli.plan.check.try_reward import RewardCheck, try_reward

GOOD = """
REWARD_TYPE = "sequential"
def f(item, bonus=0.0):
    answer = item["response"].rpartition("\\\\boxed{")[2].partition("}")[0]
    return {"overall": bonus + (answer.strip() == item["ground_truth"])}
"""


@pytest.fixture
def findings(tmp_path: Path) -> Callable[..., dict[str, RewardCheck]]:
    def find(code: str, **settings: object) -> dict[str, RewardCheck]:
        (tmp_path / "reward.py").write_text(code)
        spec = f"{tmp_path / 'reward.py'}:f"
        timeout = 0.3 if "while" in code else 60.0  # ten answers run into it
        return {finding.check: finding for finding in try_reward(spec, {}, timeout=timeout, **settings)}  # type: ignore[arg-type]

    return find


def failing(findings: dict[str, RewardCheck]) -> set[str]:
    return {finding.check for finding in findings.values() if finding.passed is False}


def run(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, ["reward", "test", *words])


def test_a_good_reward_passes_every_check(findings) -> None:  # type: ignore[no-untyped-def]
    found = findings(GOOD)
    assert failing(found) == set()
    assert found["loads"].result == "reward: sequential function"
    assert "\\boxed{} 1," in found["the ground truth, by form"].result
    assert "Answer: 0," in found["the ground truth, by form"].result
    assert found["right beats wrong"].result == "written with <think> <answer> \\boxed{}: right 1, wrong 0"
    assert "p99" in found["milliseconds per answer, alone"].result


@pytest.mark.parametrize(
    ("code", "check", "told"),
    [
        ("def f(rs):\n    return [1.0 for r in rs]\n", "right beats wrong", "right 1, wrong 1"),
        ("def f(rs):\n    return [1.0 for r in rs]\n", "empty", "as much as the right answer"),
        (
            "import random\ndef f(rs):\n    return [random.random() for r in rs]\n",
            "says the same twice",
            "scores changed",
        ),
        ("def f(rs):\n    return [1 / len(r['response']) for r in rs]\n", "empty", "2 × exception: ZeroDivisionError"),
        ("def f(rs):\n    return [float('nan')] * len(rs)\n", "scores answers", "× non_finite"),
        (
            "REWARD_TYPE = 'sequential'\ndef f(r):\n    while len(r['response']) > 90_000: pass\n    return 1.0\n",
            "100,000 characters",
            "timeout",
        ),
        (
            "def f(rs):\n    for r in rs:\n        try: eval(r['response'])\n        except Exception: pass\n"
            "    return [float(r['response'] == r['ground_truth']) for r in rs]\n",
            "evaluates nothing",
            "an answer was run as code",
        ),
        ("def f(rs):\n    return [len(rs) for r in rs]\n", "right beats wrong", "right 4"),
    ],
)
def test_what_is_wrong_with_a_reward_is_found(findings, code: str, check: str, told: str) -> None:  # type: ignore[no-untyped-def]
    found = findings(code)
    assert found[check].passed is False
    assert told in found[check].result


def test_scores_that_depend_on_the_batch_are_mentioned(findings) -> None:  # type: ignore[no-untyped-def]
    found = findings("def f(rs):\n    return [len(rs) for r in rs]\n")
    assert found["needs no batch"].passed is None
    assert "4 of 4 scores are others alone" in found["needs no batch"].result


def test_rows_bring_their_columns_and_their_truths(findings, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = [{"problem": f"{i}?", "answer": str(i), "level": i} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = (
        "def f(rs, level, prompts):\n    assert [p == f'{n}?' for p, n in zip(prompts, level)]\n"
        "    return [float(str(n) == r['ground_truth'] and r['response'] == r['ground_truth'])"
        " for r, n in zip(rs, level)]\n"
    )
    found = findings(code, data=str(tmp_path / "rows.jsonl"), samples=3)
    assert failing(found) == set()
    assert found["loads"].result == "reward: batch function, asks for level, prompts"
    assert "(3 answers)" in found["milliseconds per answer, alone"].result


def test_the_exit_code_says_whether_a_check_failed(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(GOOD)
    good = run(f"{tmp_path}/reward.py:f", "bonus=0.5", "--timeout", "60")
    assert (good.exit_code, "FAILS" in good.output) == (0, False)
    assert "right 1.5, wrong 0.5" in good.output
    (tmp_path / "reward.py").write_text("def f(rs):\n    return [1.0 for r in rs]\n")
    bad = run(f"{tmp_path}/reward.py:f")
    assert bad.exit_code == 1
    assert "FAILS" in bad.output


def test_the_last_line_is_the_verdict_or_the_command_to_type_again(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(GOOD)
    good = run(f"{tmp_path}/reward.py:f", "--timeout", "60").output.splitlines()
    checks = sum(line.rstrip("│ ").endswith(" ok") for line in good)
    assert good[-1] == f"{checks} checks passed"
    (tmp_path / "reward.py").write_text("def f(rs):\n    return [float(len(r['response']) > 0) for r in rs]\n")
    *_, count, command = run(f"{tmp_path}/reward.py:f", "--timeout", "60").output.splitlines()
    assert count.startswith(f"19 of {checks} checks failed: right beats wrong, ")
    assert command == f"correct the reward, then: r1 reward test {tmp_path}/reward.py:f --timeout 60.0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gsmk8"], "did you mean 'gsm8k'"),
        (["gsm8k", "bonus=1"], "takes no 'bonus'"),
        (["gsm8k", "--data", "no.jsonl"], "'no.jsonl' does not exist"),
        (["gsm8k", "bonus"], "expected key=value"),
    ],
)
def test_what_cannot_be_tried_is_told_plainly(words: list[str], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output


def test_a_built_in_reward_passes() -> None:
    assert run("gsm8k").exit_code == 0
