"""Ranks that share a model, in every form, are the same learner as one process."""

from functools import cache

import core_critics
import core_ranks
import core_toy
import pytest
import ranks
import torch
from core_ranks import FORMS, MODELS
from faults_table import note_fault
from safetensors.torch import load_file


@cache
def alone():
    return core_toy.learn()


def assert_same_weights(found, expected, *, atol):
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=atol, rtol=0, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize(
    ("shard_size", "shard"),
    [(-1, "sharded"), (1, "sharded"), (2, "whole until backward"), (-1, "offloaded")],
)
def test_two_ranks_learn_what_one_process_learns(shard_size, shard):
    metrics, weights = alone()
    for own, found in ranks.run(core_toy.learn, shard_size, shard):
        assert own == [pytest.approx(expected, abs=1e-10) for expected in metrics]
        assert_same_weights(found, weights, atol=1e-10)


@pytest.mark.parametrize(("shard_size", "shard"), [(-1, "sharded"), (1, "sharded")])
def test_ranks_of_which_one_runs_out_of_memory_halve_the_micro_batch_and_learn_the_same(shard_size, shard):
    expected = core_toy.take_step(core_toy.build(None, micro=2, reference=True))
    for number, outcomes in enumerate(ranks.run(core_toy.run_out_of_memory, shard_size, shard)):
        assert outcomes.pop("alone")["error"] == ("out of memory on rank 1", "planted")[number]
        for name, (*_, rank) in core_toy.ENDS.items():
            found = outcomes[name]
            assert found["ended"] == (rank == number), name
            halved = found["metrics"].pop("halved_micro_batches", 0)
            assert halved == (not name.startswith(("log-probs", "reference"))), name
            assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-10), name
            assert_same_weights(found["gradient"], expected["gradient"], atol=1e-10)
            assert_same_weights(found["found"], expected["found"], atol=1e-6)
    note_fault("a micro-batch of one rank whose memory runs out", outcome="goes on")


def test_a_loss_or_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both():
    first = core_toy.learn()[0][0]
    for number, (loss, gradient, calm) in enumerate(ranks.run(core_toy.skip_steps)):
        assert (loss[0]["skipped_steps"], gradient[0]["skipped_steps"]) == (1, 2), number
        assert loss[1], f"rank {number} took a step with an infinite loss"
        assert gradient[1], f"rank {number} took a step with an infinite gradient"
        assert calm[0] == pytest.approx({**first, "skipped_steps": 2}, abs=1e-10)
        assert not calm[1]
    note_fault("a loss or a gradient that is not finite on one rank of two", outcome="skipped")


@pytest.mark.parametrize(("shard_size", "aggregation"), [(-1, "token"), (1, "seq")])
def test_two_ranks_critic_predicts_and_learns_what_one_process_does(shard_size, aggregation):
    expected = core_critics.learn(None, aggregation)
    for found in ranks.run(core_critics.learn, shard_size, aggregation):
        core_critics.assert_same_course(found, expected)


@pytest.mark.parametrize("shard", ["sharded", "offloaded"])
def test_a_sharded_model_without_a_gradient_is_found_and_gradients_stay_as_they_were(shard):
    expected = core_toy.alone()
    for found, kept, fault in ranks.run(core_toy.probe_gradient, shard):
        assert found == [pytest.approx(own, abs=1e-12) for own in expected]
        assert kept
        assert fault == "this layer has no gradient"


def test_a_mesh_has_the_dimensions_and_the_timeout_that_were_asked_for():
    full, copies = (ranks.run(core_toy.describe, size, 77.0) for size in (-1, 1))
    assert [rank["data"] for rank in full] == [rank["data"] for rank in copies] == [(0, 2), (1, 2)]
    assert {rank["sum"] for rank in (*full, *copies)} == {3.0}
    assert full[0]["sizes"] == {"shard": 2}
    assert full[0]["timeouts"] == {ranks.DEADLINE}  # the default group's own
    assert copies[0]["sizes"] == {"replicate": 2, "shard": 1}
    assert copies[0]["timeouts"] == {77.0}


@pytest.mark.parametrize("shard_size", [3, 0, -2])
def test_a_shard_size_that_does_not_divide_the_ranks_is_refused(shard_size):
    assert (
        ranks.run(core_toy.refusal, shard_size)
        == [f"2 ranks cannot form shards of {shard_size}; it must divide them, or be -1"] * 2
    )


# --- models of transformers -----------------------------------------------------------------------------------------

# Three kinds of gradient on each model and form, and every objective on one of them: what a form and
# an objective have to do with one another is little, and test_core_invariance asks two ranks for all objectives.
EVERY = [[*core_ranks.ALL][i : i + 3] for i in range(0, len(core_ranks.ALL), 3)]


def triples_for(name, form):
    turn = [*MODELS].index(name) * len(FORMS) + [*FORMS].index(form)
    return [[*core_ranks.THREE], *EVERY[turn :: len(MODELS) * len(FORMS)]]


def test_every_objective_is_asked_for_in_a_form():
    asked = [triple for name in MODELS for form in FORMS for triple in triples_for(name, form)]
    assert {one for triple in asked for one in triple} == {*core_ranks.ALL}


@cache
def course_alone(name, *triple):
    """What one process goes through, whatever form it is compared with."""
    (course,) = core_ranks.courses(name, [triple])
    return course


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_form_takes_the_steps_of_one_process(name, form):
    triples = triples_for(name, form)
    expected = [course_alone(name, *triple) for triple in triples]
    by_rank = ranks.run(core_ranks.courses, name, triples, FORMS[form], world=FORMS[form].world)
    for own in by_rank[1:]:
        assert [course.metrics for course in own] == [course.metrics for course in by_rank[0]]
    for triple, course, wanted in zip(triples, by_rank[0], expected, strict=True):
        for one, other in zip(course.metrics, wanted.metrics, strict=True):
            assert one == pytest.approx(other, abs=1e-10), triple
        for one, other in zip(course.gradients, wanted.gradients, strict=True):
            assert_same_weights(one, other, atol=1e-10)
        assert max(float(grad.abs().max()) for grad in course.gradients[0].values()) > 1e-3, triple
        assert_same_weights(course.weights, wanted.weights, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_in_half_precision_two_ranks_are_near_one(name):
    (one,), (two, other) = (ranks.run(core_ranks.half_precision, name, world=world) for world in (1, 2))
    assert two["dtypes"] == {"torch.float32"}
    assert two["pg_loss"] == other["pg_loss"] == pytest.approx(one["pg_loss"], abs=2e-3)
    assert two["grad_norm"] == other["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.01)
    torch.testing.assert_close(two["logprobs"], one["logprobs"], atol=0.02, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text, tied", "pictures"])
def test_one_pass_gives_what_two_do(name):
    ranks.run(core_ranks.one_pass, name)


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["text, tied", "pictures"])
def saved(request, tmp_path_factory):
    """A folder in which one process (`single…`) and then two ranks have trained a model."""
    folder = tmp_path_factory.mktemp("ranks")
    core_ranks.train_and_save(request.param, folder)
    ranks.run(core_ranks.train_and_save, request.param, folder, FORMS["full"])
    return request.param, folder


def assert_same_files(folder, other):
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert_same_weights(load_file(folder / file), load_file(other / file), atol=1e-9)


@pytest.mark.slow
def test_checkpoints_do_not_know_how_many_ranks_wrote_or_read_them(saved, tmp_path):
    name, folder = saved
    for i in (1, 2, 3):
        assert_same_files(folder / f"after{i}", folder / f"single{i}")
    assert_same_files(folder / "resumed", folder / "single2")
    learner = core_ranks.build(name)
    learner.load(folder / "after1")
    core_ranks.on_policy_step(learner, name)
    learner.save(tmp_path)
    assert_same_files(tmp_path, folder / "single2")
