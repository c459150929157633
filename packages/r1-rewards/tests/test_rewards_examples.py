"""The example reward functions, loaded as a run loads them, give what EasyR1's users expect."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from r1_rewards import RewardInput, load

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
DAPO = {"max_response_length": 1000, "overlong_buffer_length": 200, "overlong_penalty_factor": 1.0}

pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="the examples belong to the repository, not to the wheel")


@pytest.fixture(scope="module")
def parts():
    """Scores samples by an example, `parts("math", sample, …, format_weight=1.0)`; each is loaded once."""
    opened = {}
    with ExitStack() as stack:

        def parts(name, *samples, **kwargs):
            if (name, *kwargs.items()) not in opened:
                verifier = load(f"{EXAMPLES}/reward_function/{name}.py:compute_score", kwargs)
                opened[name, *kwargs.items()] = stack.enter_context(verifier)
            scores = opened[name, *kwargs.items()]([RewardInput(*sample) for sample in samples])
            assert all(score.error is None for score in scores)
            return [dict(score.parts) for score in scores]

        yield parts


def test_math_weighs_accuracy_and_format(parts):
    scores = parts(
        "math",
        (r"<think>a</think> \boxed{5}", "5"),
        (r"\boxed{5}", "5"),
        (r"<think>a</think>\boxed{4}", "5"),
        ("5", "5"),
        (r"< think >a< / think > \boxed{5}", "5"),
        ("<think></think>" + r"\boxed{</think>" * 20_000, "5"),
    )
    assert [score["overall"] for score in scores] == pytest.approx([1.0, 0.9, 0.1, 0.0, 1.0, 0.0])
    assert parts("math", (r"\boxed{5}", "5"), format_weight=1.0)[0]["overall"] == 0.0


def test_r1v_weighs_accuracy_and_format_equally(parts):
    scores = parts("r1v", ("<think>a</think><answer>5</answer>", "5"), ("<answer>5</answer>", "5"), ("<think>5", "5"))
    assert [score["overall"] for score in scores] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("length", "overlong"), [(0, 0.0), (800, 0.0), (801, -0.005), (850, -0.25), (1000, -1.0), (1001, -1.0)]
)
def test_dapo_punishes_overlong_responses_softly(parts, length, overlong):
    right, wrong = parts("dapo", ("so\nAnswer: 5", "5", length), ("Answer: 4", "5", length), **DAPO)
    assert right == pytest.approx(
        {"overall": 1 + overlong, "accuracy": 1.0, "overlong": overlong, "accuracy_normalized": 1.0}
    )
    assert wrong == pytest.approx(
        {"overall": -1 + overlong, "accuracy": -1.0, "overlong": overlong, "accuracy_normalized": 0.0}
    )


def test_dapo_reads_the_last_300_characters_only(parts):
    assert parts("dapo", ("Answer: 4\n" + "x" * 400, "4"), **DAPO)[0]["accuracy"] == -1.0


def test_android_gui_compares_the_chosen_number(parts):
    scores = parts("android_gui", ("I choose option 2", "2"), (" 2\n", "2"), ("3", "1"), ("none", "1"))
    assert [score["overall"] for score in scores] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["math", "r1v", "dapo", "android_gui"])
def test_every_format_prompt_contains_the_question(name):
    assert "{{ content | trim }}" in (EXAMPLES / "format_prompt" / f"{name}.jinja").read_text()
