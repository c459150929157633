"""Ranks that share sequences are the same learner as one process: text, pictures, mixtures of experts."""

from functools import cache

import cli_ranks
import cli_sequences
import pytest
import ranks
import torch
from cli_families import IMAGE
from cli_sequences import FORMS, Course
from core_critics import assert_same_course
from torch import Tensor

# Each objective in each form, and each family, once at least: what they have to do with one another is little.
CASES = [
    ("qwen2", "KL term", "2 of 2"),
    ("qwen2", "whole sequences", "4 of 4, prompts shared"),
    ("qwen2", "full KL", "2 of 4"),
    ("qwen2.5-vl", "whole sequences", "2 of 4"),
    ("qwen3-vl", "KL term", "4 of 4, prompts shared"),
    ("qwen3-vl", "full KL", "2 of 4, two copies, prompts shared"),
    ("qwen3-moe", "KL term", "none of 2"),
    ("qwen3-moe", "whole sequences", "2 of 2"),
    ("qwen3-vl-moe", "full KL", "2 of 4"),
]


@cache
def alone(name: str, objective: str) -> Course:
    return cli_sequences.take_course(name, objective)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=atol, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective", "form"), CASES)
def test_ranks_take_the_steps_of_one_process(name: str, objective: str, form: str) -> None:
    expected = alone(name, objective)
    assert max(float(grad.abs().max()) for grad in expected.gradients.values()) > 1e-2
    for own in ranks.run(cli_sequences.take_course, name, objective, FORMS[form], world=FORMS[form].world):
        torch.testing.assert_close(own.logprobs, expected.logprobs, atol=1e-12, rtol=0)
        assert_equal(own.annotated, expected.annotated, atol=1e-6)
        for one, other in zip(own.metrics, expected.metrics, strict=True):
            assert one == pytest.approx(other, abs=1e-10)
        assert_equal(own.gradients, expected.gradients, atol=1e-10)
        assert_equal(own.weights, expected.weights, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("qwen2", "2 of 2"), ("qwen2.5-vl", "2 of 4, two copies, prompts shared")])
def test_ranks_that_share_a_critics_sequences_forecast_and_learn_what_one_process_does(name: str, form: str) -> None:
    values, expected = cli_sequences.forecast(name)
    for own, course in ranks.run(cli_sequences.forecast, name, FORMS[form], world=FORMS[form].world):
        torch.testing.assert_close(own, values, atol=1e-12, rtol=0)
        assert_same_course(course, expected)


@pytest.mark.slow
def test_a_driver_of_ranks_that_share_sequences_gets_verb_by_verb_what_the_learner_gives() -> None:
    samples, objective = cli_ranks.step_samples("text"), cli_ranks.OBJECTIVES["KL"]
    expected = cli_ranks.go_through(cli_sequences.build_learner("qwen2"), samples, objective, pads=False)
    for found, info in ranks.run(cli_sequences.verb_by_verb):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)  # float32 crosses
        assert (info.devices, info.straggler) == (2, 1.0)  # both have the same tokens of every round


@pytest.mark.parametrize("size", [2, 4])
def test_the_rows_that_are_shared_have_pictures_across_cuts_one_token_and_ranks_without_a_target(size: int) -> None:
    samples = cli_sequences.samples_for("qwen3-vl")  # an update's micro-batches have one each
    assert any(len(sample.model_inputs["image_grid_thw"]) > 1 for sample in samples if sample.model_inputs)
    assert min(len(sample.token_ids) for sample in samples) == 1
    across, empty = [], []
    for sample in samples:
        part = -(-len(sample.token_ids) // size)
        pictured = sample.token_ids == IMAGE
        across += [bool(pictured[cut - 1] and pictured[cut]) for cut in range(part, len(pictured), part)]
        empty += [not own.any() for own in sample.loss_mask.split(part)]
    assert any(across)
    assert any(empty)
    assert not all(empty)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2.5-vl", "2 of 4"),
        ("qwen3-moe", "2 of 4, two copies, prompts shared"),
        ("qwen2", "4 of 4, prompts shared"),
    ],
)
def test_ranks_fine_tune_as_one_process_does(family: str, form: str) -> None:
    (nll, logprobs), metrics, gradients = cli_sequences.fine_tune(family)
    assert metrics["pg_loss"] == pytest.approx(nll, abs=1e-6)
    assert max(float(grad.abs().max()) for grad in gradients.values()) > 1e-3
    for (_, own), found, grads in ranks.run(cli_sequences.fine_tune, family, FORMS[form], world=FORMS[form].world):
        assert found == pytest.approx(metrics, abs=1e-10)
        torch.testing.assert_close(own, logprobs, atol=1e-6, rtol=0)
        assert grads.keys() == gradients.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, gradients[name], atol=1e-10, rtol=0, msg=name)
