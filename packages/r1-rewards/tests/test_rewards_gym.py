"""The reward `reasoning_gym`: a task's own verdict, and no evaluation of what a response spells."""

from importlib.util import find_spec

import pytest

from r1_rewards import RewardInput, RewardSpecError, load
from r1_rewards.verifiers import reasoning_gym
from r1_rewards.verifiers.reasoning_gym import unsafe_reason

installed = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs r1-rewards[gym]")


def origin(task, index=0, **arguments):
    return {"task": task, "arguments": {"size": 10, "seed": 3, **arguments}, "index": index}


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("n_queens", "_ _ Q _\nQ _ _ _"), ("spiral_matrix", "1 2 3"), ("spiral_matrix", "[1, 2, 3]"),
        ("string_insertion", "['A', 'B']"), ("binary_matrix", "0 1\n1 2"), ("countdown", "(3 + 4)*2 - 1.5/7"),
        ("puzzle24", "8/(3 - 8/3)"), ("polynomial_multiplication", "2*x**2 - 7*x*y + 3"),
        ("simple_integration", "2*x**3/3 + exp(x)*sin(x) + C"), ("leg_counting", "__import__('os')"),
    ],
)  # fmt: skip
def test_plain_answers_reach_the_scorer(task, answer):
    assert unsafe_reason(task, answer) is None


@pytest.mark.parametrize("task", sorted(reasoning_gym._EVALUATED | reasoning_gym._PARSED))
@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').system('true')", "open('x', 'w')", "[print(1)]", "(lambda: 1)()", "exit()",
        "x.real.__class__", "eval(chr(49))", "ｅｖａｌ(x)", "[].append(1)", "f'{1}'", "[x for x in (1,)]", "1 .real",
    ],
)  # fmt: skip
def test_answers_that_could_be_evaluated_never_reach_a_scorer(task, answer):
    assert "this task evaluates answers" in unsafe_reason(task, answer)


@pytest.mark.parametrize("answer", ["9**9**9**9", "Integral(x, x)", "x**99999999"])
def test_formulas_that_take_for_ever_or_beg_the_question_are_not_computed(answer):
    assert unsafe_reason("simple_integration", answer)


def test_the_package_to_install_is_named(monkeypatch):
    def fail(name):
        raise ImportError(name)

    monkeypatch.setattr(reasoning_gym, "import_module", fail)
    with pytest.raises(ImportError, match=r"pip install 'r1-rewards\[gym\]'"):
        reasoning_gym.prepare()


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed")
def test_a_run_without_the_package_is_refused_before_it_starts():
    with pytest.raises(RewardSpecError, match=r"pip install 'r1-rewards\[gym\]'"):
        load("reasoning_gym")


@pytest.fixture(scope="module")
def legs():
    return str(reasoning_gym._open_task("leg_counting", '{"size": 10, "seed": 3}')[4]["answer"])


@installed
@pytest.mark.parametrize(
    "form",
    [
        "<answer> {} </answer>",
        "So it is \\boxed{{{}}}.",
        "<think>1</think>{}",
        "{}",
        "<answer>0</answer>\n<answer>{}</answer>",
    ],
)
def test_the_answer_is_read_from_tags_a_box_or_the_whole(legs, form):
    found = reasoning_gym.score(form.format(legs), legs, reasoning_gym=origin("leg_counting", 4))
    assert (found.value, found.extracted) == (1.0, legs)


@installed
@pytest.mark.parametrize("response", ["<answer>0</answer>", "", "<answer></answer>", "<think>{}"])
def test_other_answers_are_wrong(legs, response):
    found = reasoning_gym.score(response.format(legs), legs, reasoning_gym=origin("leg_counting", 4))
    assert found.parts == {"overall": 0.0, "accuracy": 0.0}


@installed
def test_rows_are_scored_in_workers_and_a_scorer_that_raises_costs_its_own_sample(legs):
    inputs = [
        RewardInput(f"<answer>{legs}</answer>", legs, metadata={"reasoning_gym": origin("leg_counting", 4)}),
        RewardInput("<answer>banana</answer>", "", metadata={"reasoning_gym": origin("prime_factorization")}),
        RewardInput("<answer>1</answer>", "1"),
        RewardInput("<answer>1</answer>", "1", metadata={"reasoning_gym": origin("no_such_task")}),
    ]
    with load("reasoning_gym", failure_score=-1.0) as verifier:
        scores = verifier(inputs)
    assert [score.value for score in scores] == [1.0, -1.0, -1.0, -1.0]
    assert [score.error and score.error.cause for score in scores] == [None, *["exception"] * 3]
    assert "reasoning_gym" in scores[2].error.message


@installed
def test_no_response_is_evaluated_by_any_task(tmp_path):
    code = f"open({str(tmp_path / 'canary')!r}, 'w')"
    for task in sorted(reasoning_gym._EVALUATED | reasoning_gym._PARSED):
        found = reasoning_gym.score(f"<answer>{code}</answer>", "", reasoning_gym=origin(task))
        assert found.value == 0.0
    assert not (tmp_path / "canary").exists()
