"""Ranks that share rows find, together, what one process finds."""

from functools import cache

import core_sequences
import pytest
import ranks
import torch


@cache
def alone(objective):
    return core_sequences.learn(objective)


def assert_same_course(found, expected):
    metrics, weights, logprobs = expected
    assert found[0] == [pytest.approx(each, abs=1e-10) for each in metrics]
    assert found[2] == [pytest.approx(each, abs=1e-6) for each in logprobs]  # float32 crosses
    for key, tensor in found[1].items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-9, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("objective", core_sequences.OBJECTIVES)
def test_two_ranks_that_share_every_row_learn_what_one_process_learns(objective):
    for found in ranks.run(core_sequences.learn, objective, 2):
        assert_same_course(found, alone(objective))


@pytest.mark.slow
def test_four_ranks_that_share_rows_by_two_learn_what_one_process_learns():
    for found in ranks.run(core_sequences.learn, "whole sequences", 2, world=4):
        assert_same_course(found, alone("whole sequences"))


def test_a_row_is_filled_up_and_each_rank_predicts_its_own_part():
    assert ranks.run(core_sequences.parts) == [[(2, 1, 2), (1, 0, 0), (2, 1, 1)], [(2, 1, 2), (1, 0, 0), (2, 0, 1)]]


def test_what_cannot_be_shared_is_refused():
    for said in ranks.run(core_sequences.refusals):
        assert said == [
            "padded micro-batches are not possible where ranks share sequences: use packed ones",
            "FSDPAttending reads no `pack`, so ranks cannot share its rows",
            "ranks share packed rows only: set padding_free, or one rank to a sequence",
            "2 ranks cannot share sequences by 3; it must divide them",
        ]


def test_a_checkpoint_does_not_know_how_many_ranks_shared_a_row(tmp_path):
    core_sequences.step_and_save(tmp_path / "one")
    expected = core_sequences.load_and_step(tmp_path / "one")
    ranks.run(core_sequences.step_and_save, tmp_path / "two", 2)
    found = [core_sequences.load_and_step(tmp_path / "two")]
    found += ranks.run(core_sequences.load_and_step, tmp_path / "one", 2)
    found += ranks.run(core_sequences.load_and_step, tmp_path / "two", 1)
    for weights in found:
        for key, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[key], atol=1e-9, rtol=0)
