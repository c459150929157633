"""A learner whose ranks are elsewhere gives what the learner itself gives, and little crosses."""

import gc
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Protocol, cast

import cli_ranks
import pytest
import ranks
import torch
from cli_ranks import LOADS, OBJECTIVES, STORE, OneRank, build, go_through, ready, step_samples
from safetensors.torch import load_file

from r1_cli.cluster.rank import Rank
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.train.types import Policy, ValueModel, collective
from r1_core.advantages import GRPO, assign
from r1_core.learner import Learner
from r1_core.learner.critic import Critic
from r1_core.learner.parallel import Parallel
from r1_core.own import OwnCodeError
from r1_core.types import Sample
from r1_rollout.weights import Weights

KL = OBJECTIVES["KL"]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    STORE.clear()
    LOADS.clear()


def ranked(name: str = "text", objective: str = "KL") -> tuple[RankedPolicy, OneRank]:
    rank = Rank(partial(build, name, objective))
    rank.join()
    crossing = OneRank(rank)
    return RankedPolicy(RankClient(crossing)), crossing


def test_ranks_rest_once_the_engines_have_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    learner, crossing = ranked()
    order: list[str] = []
    monkeypatch.setattr(crossing.rank.learner, "offload", lambda: order.append("rest"))
    for name, _ in learner.source(3).tensors():
        order.append(name)
    assert order.count("rest") == 1
    assert order[-1] == "rest"
    assert (
        learner.source(3).run_with_weights(count_weights) == len(order) - 1
    )  # who only looks does not send them to rest
    assert order.count("rest") == 1


def count_weights(weights: Weights) -> int:
    return sum(1 for _ in weights)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "objective"),
    [("text", "KL"), ("text", "full KL"), ("text", "own loss"), ("pictures", "KL"), ("video", "KL")],
)
def test_verb_by_verb_it_gives_what_the_learner_gives(name: str, objective: str) -> None:
    learner, _ = build(name, objective, Parallel())
    expected = go_through(learner, step_samples(name), OBJECTIVES[objective])
    found = go_through(ranked(name, objective)[0], step_samples(name), OBJECTIVES[objective])
    torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "objective"), [("text", "own loss"), ("pictures", "full KL"), ("video", "KL")])
def test_two_ranks_give_verb_by_verb_what_the_learner_gives(name: str, objective: str) -> None:
    learner, _ = build(name, objective, Parallel())
    expected = go_through(learner, step_samples(name), OBJECTIVES[objective])
    answers = ranks.run(cli_ranks.verb_by_verb, name, objective)
    for found, fetched, info in answers:
        assert info == replace(learner.describe(), devices=2, straggler=info.straggler, tokens=info.tokens)
        assert 1 < info.straggler < 2
        assert sum(info.tokens) > max(info.tokens) > min(info.tokens) > 0
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
        if name == "pictures":
            assert 0 < fetched < 3, "a rank has fetched pictures that it did not compute"


@pytest.mark.slow
def test_memory_of_driver_and_ranks_is_flat_over_200_steps_with_pictures() -> None:
    for taken in ranks.run(cli_ranks.take_many_steps, 200):
        assert median(taken[-20:]) == pytest.approx(median(taken[20:40]), rel=0.02)


@pytest.mark.slow
def test_ranks_that_have_all_met_a_users_fault_still_save(tmp_path: Path) -> None:
    before, _ = ranks.run(cli_ranks.fail_and_save, tmp_path)
    assert written(tmp_path / "later") == written(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == before.keys()
    assert all(torch.equal(saved[name], before[name]) for name in before)


def written(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_rank_writes_its_copy_whatever_it_does_meanwhile_and_says_what_failed(tmp_path: Path) -> None:
    learner, _ = ranked()
    learner.save(tmp_path / "at once")
    copies = [learner.snapshot() for _ in range(2)]
    learner.zero_weights({name: None for name, _ in learner.weights()})
    assert copies[1] is not None
    copies[1].write(tmp_path / "later")
    assert written(tmp_path / "later") == written(tmp_path / "at once")
    again = learner.snapshot()
    assert again is not None
    with pytest.raises(OSError, match=r"rank 0: \w+Error: .*learner.json"):
        again.write(tmp_path / "at once" / "learner.json")


def gone(*args: object, **kwargs: object) -> None:
    raise RuntimeError("learner-0 is gone")


def test_what_fails_after_ranks_are_gone_is_told_by_why_they_went(monkeypatch: pytest.MonkeyPatch) -> None:
    far, crossing = ranked(objective="failing")
    samples = ready(step_samples("text"))
    with pytest.raises(OwnCodeError, match="this is mine") as first:
        far.forward_backward(samples, KL)
    far.restore_weights()  # they are still there
    monkeypatch.setattr(crossing.rank.learner, "save", gone)
    with pytest.raises(OwnCodeError) as second:
        far.save(Path("nowhere"))
    assert second.value is first.value
    assert "learner-0 is gone" in str(second.value.__cause__)


def test_a_batch_crosses_once_and_a_field_once() -> None:
    learner, crossing = ranked()
    samples = step_samples("text")
    rows = 4 * len(samples) + 1000  # row numbers, and what else a small pickle has
    for _ in range(2):
        samples = learner.add_logprobs(samples, ["old_logprobs", "full_kl"])
    samples = assign(learner.add_logprobs(samples, ["ref_logprobs"]), GRPO())
    for minibatch in (samples[:3], samples[3:], samples[:3], samples[3:]):
        learner.forward_backward(minibatch, KL)
        learner.optim_step()
    assert Counter(verb for verb, _ in crossing.asked)["load_batch"] == 1
    tokens = sum(len(sample.token_ids) for sample in samples)
    trained = sum(sample.response_length for sample in samples)
    # Columns, the engine's log-probs, and the advantages of either minibatch.
    columns, rollout, *advantages = [stored.num_bytes for stored in crossing.stored]
    assert len(advantages) == 2
    assert columns < 4.2 * tokens + 4000
    assert rollout < 4 * tokens + rows
    assert sum(advantages) < 4 * tokens + 2 * rows
    assert max(size for verb, size in crossing.asked if verb == "policy.add_logprobs") < 2 * 4 * trained + rows
    assert max(size for verb, size in crossing.asked if verb != "policy.add_logprobs") < rows


def test_pictures_cross_once_a_prompt_and_are_fetched_once() -> None:
    learner, crossing = ranked("pictures")
    samples = step_samples("pictures")  # the first two share theirs, the fourth has none
    learner.add_logprobs(samples[3:4], ["old_logprobs"])
    assert len(crossing.stored) == 2  # columns, and the engine's log-probs
    learner.add_logprobs(samples, ["old_logprobs"])
    assert len(crossing.stored) == 7
    pictures = crossing.stored[2:5]
    for stored, sample in zip(pictures, (samples[0], samples[2], samples[4]), strict=True):
        assert stored.num_bytes < sum(tensor.nbytes for tensor in sample.model_inputs.values()) + 500
    assert Counter(LOADS)[pictures[0].place] == 1


def test_a_new_batch_lets_go_of_the_last_one_here_and_there() -> None:
    learner, crossing = ranked("pictures")
    samples = step_samples("pictures")
    learner.add_logprobs(samples, ["old_logprobs"])
    there = crossing.rank._batch[0]
    kept = [weakref.ref(one) for one in (samples[2].token_ids, there.token_ids, there.model_inputs)]
    del samples, there
    learner.add_logprobs(step_samples("pictures")[:1], ["old_logprobs"])
    gc.collect()
    assert [one() for one in kept] == [None, None, None]


def test_samples_with_other_tokens_masks_positions_or_pictures_are_another_batch() -> None:
    learner, crossing = ranked("pictures")
    samples = step_samples("pictures")
    learner.add_logprobs(samples, ["old_logprobs"])
    for count, changed in enumerate(
        [
            replace(samples[0], token_ids=samples[0].token_ids.clone()),
            replace(samples[0], loss_mask=samples[0].loss_mask.clone()),
            replace(samples[0], position_ids=samples[0].position_ids.clone()),
            replace(samples[0], model_inputs=dict(samples[0].model_inputs)),
        ],
        start=2,
    ):
        learner.add_logprobs([changed], ["old_logprobs"])
        assert Counter(verb for verb, _ in crossing.asked)["load_batch"] == count


def test_a_sample_twice_with_other_fields_counts_twice() -> None:
    samples = ready(step_samples("text"))
    one, other = samples[0], replace(samples[0], advantages=-2 * samples[0].advantages)
    learner, _ = build("text", "KL", Parallel())
    expected = learner.forward_backward([one, other, *samples[1:]], KL)
    far, _ = ranked()
    far.add_logprobs(samples, ["old_logprobs"])
    assert far.forward_backward([one, other, *samples[1:]], KL) == pytest.approx(expected, abs=1e-12)
    assert far.forward_backward([other, one, *samples[1:]], KL) == pytest.approx(expected, abs=1e-12)


def test_a_field_that_is_taken_away_or_replaced_is_so_on_the_ranks() -> None:
    samples = ready(step_samples("text"))
    (learner, _), (far, _) = build("text", "KL", Parallel()), ranked()
    far.forward_backward(samples, KL)
    for changed in (
        [replace(s, old_logprobs=-2 * torch.ones(len(s.token_ids))) for s in samples],
        [replace(s, weights=torch.full((len(s.token_ids),), 0.5)) for s in samples],
        samples,  # without weights again
    ):
        assert far.forward_backward(changed, KL) == pytest.approx(learner.forward_backward(changed, KL), abs=1e-12)
    mixed = [replace(samples[0], ref_logprobs=None), *samples[1:]]
    with pytest.raises(ValueError, match=r"sample 0 \(group 0\) has no ref_logprobs, which \d+ of \d+ samples have"):
        far.forward_backward(mixed, KL)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "was given no samples"),
        (step_samples("text"), "a sample has no old_logprobs; call add_logprobs first"),
        ([replace(s, advantages=None) for s in ready(step_samples("text"))], "a sample has no advantages"),
    ],
    ids=["no samples", "no old log-probs", "no advantages"],
)
def test_what_a_learner_refuses_a_ranked_one_does_with_the_same_words(samples: list[Sample], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ranked()[0].forward_backward(samples, KL)


def test_steps_of_nothing_one_sample_or_none_that_trains_are_what_they_are_to_a_learner() -> None:
    (learner, _), (far, crossing) = build("text", "KL", Parallel()), ranked()
    assert far.add_logprobs([], ["old_logprobs"]) == []
    assert [label for label, _ in crossing.asked] == ["policy.add_logprobs"]
    samples = ready(step_samples("text"))
    for few in (samples[:1], samples[-1:]):  # the last has no trained token
        assert far.add_logprobs(few, ["old_logprobs"])[0].old_logprobs.tolist() == pytest.approx(
            learner.add_logprobs(few, ["old_logprobs"])[0].old_logprobs.tolist(), abs=1e-9
        )
        assert far.forward_backward(few, KL) == pytest.approx(learner.forward_backward(few, KL), abs=1e-9)


def test_what_a_model_cannot_read_in_one_row_is_raised_and_the_ranks_go_on() -> None:
    far, _ = ranked("pictures")
    samples = step_samples("pictures")
    wrong = [replace(samples[0], position_ids=samples[0].position_ids + 1)]
    with pytest.raises(ValueError, match="must count 0, 1, 2"):
        far.compute_logprobs_together(wrong, padding_free=True)
    assert len(far.compute_logprobs_together(samples, padding_free=True)) == 5


def test_weights_come_in_buckets_and_a_pass_that_is_broken_off_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("r1_cli.cluster.rank.BUCKET", 1000)
    far, crossing = ranked()
    whole = {name: tensor.clone() for name, tensor in far.weights()}
    assert whole.keys() == {name for name, _ in crossing.rank.learner.weights()}
    assert sum(verb == "next_weights" for verb, _ in crossing.asked) > 5
    some = far.weights()
    next(some)
    some.close()
    assert crossing.asked[-1][0] == "end_weights"
    assert {name: tensor.sum() for name, tensor in far.weights()} == {n: t.sum() for n, t in whole.items()}


def count_first(weights: Weights) -> int:
    """A task that looks at one tensor and leaves the others."""
    return next(iter(weights))[1].numel()


def test_a_task_on_the_weights_runs_on_the_first_rank_alone_and_all_gather_to_the_end() -> None:
    _, crossing = ranked()
    rank, gathered = crossing.rank, Counter[str]()
    own = rank.learner.weights

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in own():
            gathered[name] += 1
            yield name, tensor

    rank.learner.weights = watched
    assert crossing.call("run_with_weights", count_first) > 0
    rank._rank = 1
    assert crossing.call("run_with_weights", count_first) is None
    assert {*gathered.values()} == {2}
    assert len(gathered) == len(dict(own()))


class LongestPolicy(Policy, Protocol):
    """A policy with one more method."""

    @collective(reduce=max)
    def longest(self, samples: Sequence[Sample], *, scale: float = 1.0) -> float: ...


def test_a_new_method_of_a_learner_is_called_on_ranks_by_its_declaration_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    far, crossing = ranked()
    far = RankedPolicy(far.client, LongestPolicy)

    def longest(self: Learner, samples: Sequence[Sample], *, scale: float = 1.0) -> float:
        return scale * max(len(sample.token_ids) for sample in samples)

    monkeypatch.setattr(Learner, "longest", longest, raising=False)
    samples = step_samples("text")
    assert far.longest(samples, scale=2.0) == 2 * max(len(sample.token_ids) for sample in samples)
    assert [label for label, _ in crossing.asked] == ["load_batch", "policy.longest"]
    with pytest.raises(AttributeError, match="the policy on the ranks has no method shortest"):
        _ = far.shortest


@pytest.mark.parametrize(("protocol", "model"), [(Policy, Learner), (ValueModel, Critic)])
def test_a_learner_has_the_methods_that_ranks_call_with_parameters_of_these_names(protocol: type, model: type) -> None:
    """Ranks pass every argument by name, and mypy does not compare names of parameters with a protocol's."""
    declared = [name for name in dir(protocol) if callable(getattr(protocol, name)) and not name.startswith("_")]
    assert len(declared) > 9
    for name in declared:
        own, ours = (set(signature(getattr(one, name)).parameters) for one in (model, protocol))
        assert ours <= own, name


def test_a_learner_method_is_spelled_in_two_source_files_of_which_no_caller_is_one() -> None:
    """The base class of r1_core and the protocol: no file of the cluster has to change for a new method."""
    sources = [*package_folder(Learner).rglob("*.py"), *package_folder(RankedPolicy).rglob("*.py")]
    spelled = [path.name for path in sources if re.search(r"def set_micro_batch_limits\b", path.read_text())]
    assert sorted(spelled) == ["trainable.py", "types.py"]


def package_folder(of: type) -> Path:
    """The package folder that a class is from."""
    return Path(cast(str, import_module(of.__module__.partition(".")[0]).__file__)).parent


def test_ranks_count_the_features_of_pictures_as_a_learner_does() -> None:
    learner, _ = build("pictures", "KL", Parallel())
    samples = step_samples("pictures")
    expected = learner.count_features(samples)
    assert ranked("pictures")[0].count_features(samples) == expected
    assert any(expected)
