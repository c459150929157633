"""The learner computes each token with the experts that the engine chose for it (R3, arXiv 2510.11370)."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import forced_routing
import numpy as np
import pytest
import ranks
import torch
from architectures import SumOfLogprobs, compute_alone, make_samples
from endtoend import QUICKSTART, R1, SMALL, read_log
from forced_routing import FAMILIES, compute_forced, make_learner, with_choices
from tiny_models import make_model
from torch import Tensor

from r1_cli.build.learner import refuse_unreplayable
from r1_cli.cluster.batch_transfer import diff_fields, update_fields
from r1_cli.hardware import Hardware
from r1_cli.models.load import ModelError
from r1_cli.train.episodes.episode import Path as EpisodePath
from r1_cli.train.groups.group import Group, Response, to_samples
from r1_cli.train.groups.stream_position import load_groups, save_groups
from r1_cli.train.groups.trajectory import Trajectory, Turn
from r1_core.learner import Learner
from r1_core.types import Sample
from r1_data.turns.continuation import Continuation
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.probes import ProbePrompt, text_probes
from r1_rollout.routing import Routing, RoutingError, require_routing, unrouted
from r1_rollout.types import Completion, SamplingParams

LAYOUTS = ("shared", "packed", "padded", "single")
TOLERANCE = 1e-5


def logprobs_of(learner: Learner, samples: list[Sample]) -> Tensor:
    return learner.compute_logprobs(samples, ["old_logprobs"])["old_logprobs"]


def record_alone(model: Any, sample: Sample, *, last: bool = False) -> Sample:
    """Return the sample with the experts that a model chooses for it, unknown of the last token as from an engine."""
    routing = Routing.of(model)
    assert routing is not None
    with torch.no_grad(), routing.recording() as record:
        model(input_ids=sample.token_ids[None], use_cache=False)
        experts = record()
    if not last:
        experts[-1] = unrouted(experts.dtype)
    return replace(sample, routed_experts=experts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_of_the_models_own_choice_changes_no_bit(layout: str) -> None:
    learner, plain = make_learner("qwen3_moe", layout)
    samples = make_samples(1)
    recorded = [record_alone(plain, sample) for sample in samples]
    assert torch.equal(logprobs_of(learner, recorded), logprobs_of(learner, samples))
    gradients = []
    for given in (samples, recorded):
        learner.model.zero_grad()
        learner.forward_backward(given, SumOfLogprobs())
        gradients.append({name: p.grad.clone() for name, p in learner.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def load_of(samples: list[Sample]) -> dict[str, float]:
    """Return the metrics of experts, by hand: of the tokens that predict trained ones, in each of their samples."""
    chosen = torch.cat([one.routed_experts[:-1][one.loss_mask[1:]] for one in samples]).long()  # type: ignore[index]
    found = []
    for layer in chosen.unbind(1):
        loads = [int((layer == expert).sum()) for expert in range(4)]
        shares = [load / sum(loads) for load in loads]
        entropy = -sum(share * math.log(share) for share in shares if share)
        found.append((4 * max(shares), loads.count(0) / 4, entropy / math.log(4)))
    widest, unused, entropies = zip(*found, strict=True)
    layers = len(found)
    return {
        "expert_load_max": max(widest),
        "experts_unused": sum(unused) / layers,
        "expert_load_entropy": sum(entropies) / layers,
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_other_choices_give_the_logprobs_and_gradients_of_an_eager_forward_with_forced_experts(
    family: str, layout: str
) -> None:
    learner, plain = make_learner(family, layout, checkpointed=layout in ("shared", "padded"))
    samples = with_choices(family)
    expected = torch.cat(compute_forced(family, plain, samples))
    unforced = logprobs_of(learner, [replace(sample, routed_experts=None) for sample in samples])
    assert (unforced - expected).abs().max() > 0.05  # the choices are others
    assert (logprobs_of(learner, samples) - expected).abs().max() < TOLERANCE
    metrics = learner.forward_backward(samples, SumOfLogprobs())
    assert metrics == pytest.approx(load_of(samples), rel=1e-12)
    torch.cat(compute_forced(family, plain, samples)).sum().backward()
    own = dict(learner.model.named_parameters())
    router = {name for name, parameter in own.items() if ".gate.weight" in name or ".router.weight" in name}
    assert router
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            found = own[name].grad
            assert found is not None, name
            assert (found - parameter.grad).norm() <= TOLERANCE * parameter.grad.norm(), name
            assert parameter.grad.norm() > 0 or name not in router


def test_a_reference_and_a_teacher_choose_by_themselves() -> None:
    reference, teacher = make_model("mixtral"), make_model("mixtral")
    for one in (reference, teacher):
        Routing.of(one)
    model = make_model("mixtral")
    Routing.of(model)
    learner = Learner(
        model, torch.optim.SGD(model.parameters()), lambda step: 1.0, reference=reference, teacher=teacher
    )
    samples = with_choices("mixtral")
    found = learner.compute_logprobs(samples, ["old_logprobs", "ref_logprobs", "teacher_logprobs"])
    own = torch.cat([compute_alone(make_model("mixtral"), sample) for sample in samples])
    assert (found["ref_logprobs"] - own).abs().max() < TOLERANCE
    assert (found["teacher_logprobs"] - own).abs().max() < TOLERANCE
    assert (found["old_logprobs"] - own).abs().max() > 0.05


def test_tokens_without_a_record_choose_by_themselves() -> None:
    learner, plain = make_learner("mixtral")
    sample = record_alone(plain, make_samples(1)[0])
    unknown = torch.full_like(sample.routed_experts, unrouted(torch.uint8))
    assert torch.equal(logprobs_of(learner, [replace(sample, routed_experts=unknown)]), logprobs_of(learner, [sample]))


# --- engine -----------------------------------------------------------------------------------------------------------


def engine_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        make_model(family).to(dtype), end_token_ids=[258], version=0, return_routed_experts=True, **options
    )


def sample_from(engine: EmbeddedEngine, n: int = 3, seed: int = 1) -> list[Sample]:
    probes = text_probes(range(250), axes=1, longest_prompt=14, longest_response=4).prompts
    prompts = [Prompt(one.id, "", [*one.token_ids], [*one.token_ids], one.position_ids, "") for one in probes]
    with engine.active():
        groups = dict(engine.generate(prompts, SamplingParams(n=n, max_tokens=10, seed=seed)))
    return to_samples(
        [
            Group(prompt, [Response(one, "", Score(0.0), 0.0) for one in groups[place]])
            for place, prompt in enumerate(prompts)
        ]
    )


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_5_moe_text"])
def test_an_engine_records_the_experts_of_prompts_and_answers(family: str) -> None:
    model = make_model(family)
    for sample in sample_from(engine_of(family)):
        expected, found = record_alone(model, sample).routed_experts, sample.routed_experts
        assert found is not None
        assert expected is not None
        assert torch.equal(found.sort(-1).values, expected.sort(-1).values)


def test_a_session_records_the_experts_of_what_it_computed_in_earlier_turns() -> None:
    model, prompt = make_model("mixtral"), ProbePrompt("one", [*range(40)], torch.arange(40)[None])
    engine = engine_of("mixtral")
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True)
    with engine.active():
        session = engine.open_session(params)
        for turn in range(3):
            session.submit("one", prompt, max_tokens=6)
            ((_, (completion,)),) = session.poll()
            tokens = torch.tensor([*prompt.token_ids, *completion.token_ids.tolist()])
            sample = Sample(tokens, torch.ones(len(tokens), dtype=torch.bool), torch.arange(len(tokens))[None], 0, 0.0)
            expected, found = record_alone(model, sample).routed_experts, completion.routed_experts
            assert expected is not None
            assert np.array_equal(np.sort(found, -1), expected.sort(-1).values.numpy())
            prompt = ProbePrompt(f"turn {turn}", [*tokens.tolist(), 5, 6, 7], torch.arange(len(tokens) + 3)[None])
    assert session.prefilled < 40 + 2 * 10  # later turns went on from earlier ones


@pytest.mark.parametrize("cached", [True, False])
def test_an_episode_replays_the_experts_of_all_its_turns_and_of_what_stood_between_them(
    cached: bool, tmp_path: Path
) -> None:
    model = make_model("mixtral")
    prompt = Prompt("one", "", [*range(40)], [*range(40)], torch.arange(40)[None], "")
    engine, path = engine_of("mixtral", prefix_cache_bytes=1 << 20 if cached else 0), EpisodePath(prompt)
    with engine.active():
        session = engine.open_session(SamplingParams(max_tokens=6, seed=1, ignore_eos=True))
        for turn in range(3):
            session.submit("one", path.context, max_tokens=6)
            ((_, (completion,)),) = session.poll()
            begin = path.length
            path.add_sampled(completion)
            path.turns.append(Turn("assistant", begin, path.length))
            path.add_continuation(Continuation([5, 6, turn], [5, 6, turn], torch.arange(3)[None]))
    assert (session.prefilled < 60) == cached
    fork = path.trajectory("forked", "", prompt=prompt)
    episode = path.trajectory("done", "", prompt=None, forks=[fork])
    lacking = Trajectory([7], [0.0], [True], [Turn("assistant", 0, 1)], torch.arange(41)[None], "done", 0)
    group = Group(prompt, [Response(one, "", Score(0.0), 0.0) for one in (episode, lacking)], row=0)
    save_groups([group], tmp_path)
    of_fork, main, unknown = to_samples(load_groups(tmp_path, lambda row: prompt))
    expected = record_alone(model, main, last=True).routed_experts
    for sample in (of_fork, main):
        assert sample.routed_experts is not None
        assert expected is not None
        last = len(sample.token_ids) - 4  # of what the engine computed
        assert torch.equal(sample.routed_experts[:last].sort(-1).values, expected[:last].sort(-1).values)
        assert (sample.routed_experts[last:] == unrouted(torch.uint8)).all()
    assert unknown.routed_experts is not None
    assert (unknown.routed_experts == unrouted(torch.uint8)).all()
    learner, _ = make_learner("mixtral")
    found = logprobs_of(learner, [main])
    assert main.rollout_logprobs is not None
    assert (found - main.rollout_logprobs[main.loss_mask]).abs().max() < TOLERANCE


def test_requests_of_one_prompt_that_is_computed_once_have_its_experts() -> None:
    model = make_model("mixtral")
    same = ProbePrompt("same", [*range(30)], torch.arange(30)[None])
    other = ProbePrompt("other", [*range(50, 82)], torch.arange(32)[None])
    engine, keys = engine_of("mixtral"), {"a": same, "b": other, "c": replace(same, id="c")}
    with engine.active():
        session = engine.open_session(SamplingParams(max_tokens=1, seed=1))
        for key, prompt in keys.items():
            session.submit(key, prompt, max_tokens=1)
        for key, (completion,) in session.poll():
            tokens = torch.tensor(keys[key].token_ids)
            sample = Sample(tokens, torch.ones(len(tokens), dtype=torch.bool), torch.arange(len(tokens))[None], 0, 0.0)
            expected, found = record_alone(model, sample, last=True).routed_experts, completion.routed_experts
            assert found is not None
            assert expected is not None
            assert np.array_equal(np.sort(found[:-1], -1), expected.sort(-1).values.numpy())


def test_an_engine_that_is_not_asked_records_nothing() -> None:
    engine = EmbeddedEngine(make_model("mixtral"), end_token_ids=[258], version=0)
    assert {sample.routed_experts for sample in sample_from(engine)} == {None}


def test_replay_brings_a_bfloat16_engine_and_a_float32_learner_nearer() -> None:
    learner, _ = make_learner("qwen3_moe")
    gaps = {}
    samples = [one for seed in range(4) for one in sample_from(engine_of("qwen3_moe", torch.bfloat16), seed=seed)]
    sampled = torch.cat([sample.rollout_logprobs[sample.loss_mask] for sample in samples])
    for replays in (True, False):
        given = samples if replays else [replace(sample, routed_experts=None) for sample in samples]
        gaps[replays] = (logprobs_of(learner, given) - sampled).abs()
    assert gaps[True].mean() < gaps[False].mean()
    assert gaps[True].max() < gaps[False].max()


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_routers_that_cannot_be_replayed_are_refused_by_name() -> None:
    with pytest.raises(RoutingError, match="LlamaForCausalLM is no mixture of experts"):
        require_routing(make_model("llama"))
    with pytest.raises(RoutingError, match=r"PhimoeForCausalLM .* choose by no top-k over all experts"):
        require_routing(make_model("phimoe"))
    with pytest.raises(RoutingError, match=r"DogeForCausalLM .* no tensors"):
        require_routing(make_model("doge"))
    with pytest.raises(ValueError, match="PhimoeForCausalLM"):
        engine_of("phimoe")
    with pytest.raises(ModelError, match=r"worker.actor.router_replay=true: the routers of PhimoeForCausalLM"):
        refuse_unreplayable(make_model("phimoe"), Hardware("cpu"))


@pytest.mark.parametrize("family", ["doge", "phimoe", "jetmoe"])
def test_a_model_whose_routers_are_not_known_learns_without_metrics_of_experts(family: str) -> None:
    learner, _ = make_learner(family)
    assert learner.forward_backward(make_samples(1), SumOfLogprobs()) == {}


def test_a_record_of_another_model_is_refused() -> None:
    learner, _ = make_learner("mixtral")
    sample = with_choices("mixtral")[0]
    assert sample.routed_experts is not None
    with pytest.raises(RoutingError, match="has 2 layers of experts, and the recorded choices 1"):
        logprobs_of(learner, [replace(sample, routed_experts=sample.routed_experts[:, :1])])
    with pytest.raises(RoutingError, match=r"\[48, 2\], \[tokens, k\], and the record has \[48, 1\]|chooses experts"):
        logprobs_of(learner, [replace(sample, routed_experts=sample.routed_experts[..., :1])])
    model = make_model("llama")
    dense = Learner(model, torch.optim.SGD(model.parameters()), lambda step: 1.0)
    with pytest.raises(ValueError, match="LlamaForCausalLM cannot replay them"):
        logprobs_of(dense, [sample])


def test_forced_experts_of_the_reference_are_those_given() -> None:
    """The reference of this file: its own choice, forced, is its own forward."""
    for family in FAMILIES:
        plain, sample = make_model(family), make_samples(1)[0]
        recorded = record_alone(make_model(family), sample, last=True)
        before = compute_alone(plain, sample)
        (forced,) = forced_routing.compute_forced(family, plain, [recorded])
        assert (forced - before).abs().max() < TOLERANCE


# --- around it --------------------------------------------------------------------------------------------------------


def test_experts_of_a_kept_group_come_back_from_a_checkpoint_and_reach_the_ranks(tmp_path: Path) -> None:
    prompt = Prompt("one", "", [1, 2], [1, 2], torch.arange(2)[None], "")
    experts = [np.arange(2 * length, dtype=np.uint8).reshape(length, 2, 1) for length in (5, 4)]
    completions = [
        Completion([7] * (len(one) - 2), [-0.5] * (len(one) - 2), "stop", 3, routed_experts=one) for one in experts
    ]
    group = Group(prompt, [Response(one, "", Score(0.0), 0.0) for one in completions], row=0)
    save_groups([group], tmp_path)
    (back,) = load_groups(tmp_path, lambda row: prompt)
    samples = to_samples([back])
    arrived = [replace(sample, routed_experts=None) for sample in samples]
    update_fields(arrived, diff_fields(arrived, samples, [0, 1]))
    for sample, expected in zip(arrived, experts, strict=True):
        assert sample.routed_experts is not None
        assert sample.routed_experts.numpy().tobytes() == expected.tobytes()
        assert sample.routed_experts.shape == expected.shape


def test_a_run_replays_what_its_engine_chose(r1: R1, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[bool] = []  # of the policy, whether they replayed
    replaying = Routing.replaying

    def watched(routing: Routing, choice: Tensor | None, counted: Tensor | None = None) -> Any:
        passes.append(choice is not None)
        return replaying(routing, choice, counted)

    monkeypatch.setattr(Routing, "replaying", watched)
    model = families.save_model("qwen3_vl_moe", tmp_path / "model")
    words = ["train", QUICKSTART, *SMALL, f"worker.actor.model.model_path={model}", "trainer.max_steps=1"]
    words += ["trainer.val_before_train=false", "trainer.val_freq=-1", "data.val_files=null"]
    words += ["worker.actor.model.enable_gradient_checkpointing=true", "worker.rollout.name=embedded"]
    logs = {}
    for replays in ("true", "false"):
        folder = tmp_path / replays
        r1(*words, f"worker.actor.router_replay={replays}", f"trainer.save_checkpoint_path={folder}")
        (logs[replays],) = read_log(folder)
        assert any(passes) == (replays == "true")
        assert passes[-1] == (replays == "true")
        passes.clear()
    for log in logs.values():
        assert log["rollout/logprob_gap_max"] < 1e-3
        assert 1 < log["actor/expert_load_max"] <= 4
        assert 0 <= log["actor/experts_unused"] < 1
        assert 0 < log["actor/expert_load_entropy"] <= 1


def test_a_run_of_a_model_without_experts_is_refused(r1: R1, tmp_path: Path) -> None:
    words = [
        "worker.actor.router_replay=true",
        f"trainer.save_checkpoint_path={tmp_path}",
        "worker.rollout.name=embedded",
    ]
    process = r1("train", QUICKSTART, *SMALL, *words, ok=False)
    assert process.exit_code == 2
    assert "is no mixture of experts, so there are no routers to replay" in process.output


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_replay_as_one_process(sequence: int, tmp_path: Path) -> None:
    make_model("mixtral").save_pretrained(tmp_path)
    learner, _ = make_learner("mixtral")
    alone = learner.forward_backward(with_choices("mixtral"), SumOfLogprobs())
    for gap, off, metrics in ranks.run(forced_routing.compare_on_ranks, str(tmp_path), "mixtral", sequence):
        assert gap < TOLERANCE
        assert off < TOLERANCE
        assert metrics == alone
