"""vLLM against plain forwards of the same model: log-probs, syncs, noise, bans, stops, adapters and faults."""

import importlib.util
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_cases import (
    BANNED,
    END,
    FAMILIES,
    PROMPTS,
    STARTED,
    TOLERANCE,
    Case,
    HandPrompt,
    adapted,
    adapter_bytes,
    assert_exact,
    bytes_in,
    make_model,
    next_version,
    plain_logprobs,
    sample,
    start,
)

from r1_rollout.errors import EngineError, NonFiniteLogits, PromptError, WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.transports.adapter import write_adapter
from r1_rollout.types import Generator, SamplingParams
from r1_rollout.vllm.engine import VllmEngine
from r1_rollout.weight_checks import expected_checksums
from r1_rollout.weights import LocalWeights

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]


@pytest.fixture(scope="module", params=list(FAMILIES))
def any_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from start(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield from start("qwen2 tied", tmp_path_factory.mktemp("model"), lora_rank=8)


def test_logprobs_are_the_learners_after_every_sync(any_family: Case) -> None:
    for seed in range(1, 5):
        model = make_model(any_family.family, seed)
        version = next_version(any_family.engine)
        with any_family.engine.active(LocalWeights(model.state_dict().items(), version)):
            groups = dict(any_family.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=2, temperature=0.7)))
        assert_exact(model, [groups[index] for index in range(len(PROMPTS))], 0.7)
        assert {completion.weight_version for group in groups.values() for completion in group} == {version}


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("cut", [{}, {"top_p": 0.6}, {"top_k": 4}, {"min_p": 0.2}])
def test_logprobs_know_nothing_of_bans_and_cuts(case: Case, temperature: float, cut: dict[str, Any]) -> None:
    groups = sample(case, SamplingParams(max_tokens=8, n=3, temperature=temperature, **cut))
    assert_exact(case.model, groups, temperature)


def test_the_engine_is_a_generator(case: Case) -> None:
    engine: Generator = case.engine
    assert engine is case.engine


def test_given_answers_are_scored_as_samples_are(case: Case) -> None:
    responses = [[1, 2, 3], [60], [], [5] * 20, [9, 61]]  # banned tokens, too
    for temperature in (1.0, 0.5):
        with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
            scores = case.engine.logprobs_of(PROMPTS, responses, temperature)
        for prompt, response, own in zip(PROMPTS, responses, scores, strict=True):
            assert len(own) == len(response)
            if response:
                expected = plain_logprobs(case.model, prompt, response, temperature)
                torch.testing.assert_close(torch.tensor(own), expected, atol=TOLERANCE, rtol=0)


def test_a_banned_token_is_not_sampled_even_if_it_is_all_that_the_model_wants(case: Case) -> None:
    model = make_model("qwen2 tied")
    with torch.no_grad():
        model.model.embed_tokens.weight[list(BANNED)] *= 50
    for temperature in (1.0, 0.0):
        with case.engine.active(LocalWeights(model.state_dict().items(), next_version(case.engine))):
            groups = dict(case.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=4, temperature=temperature)))
        assert not {t for group in groups.values() for c in group for t in c.token_ids.tolist()} & {*BANNED}


def test_a_samples_noise_depends_on_seed_prompt_and_index_alone(case: Case) -> None:
    params = SamplingParams(max_tokens=8, n=3, seed=5)
    together = sample(case, params)
    alone = sample(case, params, [PROMPTS[3]])
    assert [c.token_ids.tolist() for c in alone[0]] == [c.token_ids.tolist() for c in together[3]]
    assert [c.token_ids.tolist() for c in sample(case, params)[2]] == [c.token_ids.tolist() for c in together[2]]
    answers = [tuple(c.token_ids.tolist()) for group in together for c in group]
    assert len(set(answers)) > len(answers) // 2
    other = sample(case, SamplingParams(max_tokens=8, n=3, seed=6))
    assert [c.token_ids.tolist() for c in other[2]] != [c.token_ids.tolist() for c in together[2]]


def test_answers_end_at_end_tokens_stop_tokens_or_the_limit(case: Case) -> None:
    ends = sample(case, SamplingParams(max_tokens=40, n=8, temperature=2.0))
    for completion in (c for group in ends for c in group):
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
        assert END not in completion.token_ids[:-1].tolist()
    assert {c.finish_reason for group in ends for c in group} == {"stop", "length"}
    for completion in sample(case, SamplingParams(max_tokens=40, n=4, temperature=2.0, ignore_eos=True))[0]:
        assert (len(completion.token_ids), completion.finish_reason) == (40, "length")
    first = ends[0][0].token_ids[0]
    stopped = sample(case, SamplingParams(max_tokens=40, n=8, temperature=2.0, stop_token_ids=(first,)))
    assert (stopped[0][0].token_ids.tolist(), stopped[0][0].finish_reason) == ([first], "stop")


def test_stop_strings_need_a_tokenizer(case: Case) -> None:
    with (
        case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))),
        pytest.raises(ValueError, match="no tokenizer"),
    ):
        case.engine.generate(PROMPTS, SamplingParams(max_tokens=4, stop=("x",)))


def test_groups_come_as_they_finish_and_a_closed_call_leaves_nothing_behind(case: Case) -> None:
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        first = case.engine.generate(PROMPTS, SamplingParams(max_tokens=40, n=4, temperature=2.0))
        index, group = next(first)
        assert len(group) == 4
        assert index in range(len(PROMPTS))
        second = dict(case.engine.generate(PROMPTS, SamplingParams(max_tokens=2, n=1)))  # ends the first
        assert sorted(second) == list(range(len(PROMPTS)))
        with pytest.raises(RuntimeError, match=r"a later generate\(\) began"):
            next(first)
        assert not case.engine._llm.llm_engine.has_unfinished_requests()


def test_generating_asleep_and_waking_twice_are_refused(case: Case) -> None:
    with pytest.raises(RuntimeError, match="needs an active engine"):
        case.engine.generate(PROMPTS, SamplingParams(max_tokens=2))
    weights = list(case.model.state_dict().items())
    with case.engine.active(LocalWeights(weights, next_version(case.engine))):
        left = case.engine.generate(PROMPTS, SamplingParams(max_tokens=40))
        with pytest.raises(RuntimeError, match="active already"), case.engine.active(LocalWeights(weights, 99)):
            pass
    with pytest.raises(RuntimeError, match="its active block ended"):
        next(left)
    with (
        pytest.raises(WeightsError, match="version 0 are older than version"),
        case.engine.active(LocalWeights(weights, 0)),
    ):
        pass


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_temperatures_that_vllm_does_not_sample_at_are_refused(case: Case, temperature: float) -> None:
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        with pytest.raises(ValueError, match="to 2 under vLLM"):
            case.engine.generate(PROMPTS, SamplingParams(max_tokens=2, temperature=temperature))
        with pytest.raises(ValueError, match="to 2 under vLLM"):
            case.engine.logprobs_of(PROMPTS[:1], [[3]], temperature)
        assert len(list(case.engine.generate(PROMPTS, SamplingParams(max_tokens=2, temperature=2.0)))) == len(PROMPTS)


def test_prompts_that_are_empty_or_too_long_are_named(case: Case) -> None:
    long = HandPrompt("row 9", [1] * 100)
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        with pytest.raises(ValueError, match=r"prompt row 9 has 100 tokens.*max_model_len=128"):
            case.engine.generate([*PROMPTS, long], SamplingParams(max_tokens=29))
        with pytest.raises(ValueError, match="prompt row 3 is empty"):
            case.engine.generate([HandPrompt("row 3", [])], SamplingParams(max_tokens=29))


def test_the_engines_weights_are_the_learners_byte_by_byte_where_it_keeps_them_as_they_came(case: Case) -> None:
    weights = dict(case.model.state_dict())
    with case.engine.active(LocalWeights(weights.items(), next_version(case.engine))):
        assert [*case.engine.compare(expected_checksums(weights.items(), case.engine.precisions)).differing] == []
        weights["model.norm.weight"] = weights["model.norm.weight"] * 1.0001
        weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"] * 1.0001
        stale = [*case.engine.compare(expected_checksums(weights.items(), case.engine.precisions)).differing]
    assert sorted(stale) == ["model.embed_tokens.weight", "model.norm.weight"]


def test_one_bad_prompt_leaves_the_engine_well(case: Case) -> None:
    strange = HandPrompt("row 4", [1, 64])
    seen = HandPrompt("row 5", [1, 2], model_inputs={"pixel_values": torch.zeros(1, 3, 4, 4)})
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        with pytest.raises(PromptError, match="row 4: token 64 is outside the vocabulary of 64"):
            case.engine.generate([*PROMPTS, strange], SamplingParams(max_tokens=4))
        with pytest.raises(PromptError, match=f"{PROMPTS[0].id}: response token -1 is outside"):
            case.engine.logprobs_of(PROMPTS[:1], [[3, -1]])
        with pytest.raises(PromptError, match="row 5 has pixel_values, but vLLM takes only pictures"):
            list(case.engine.generate([seen], SamplingParams(max_tokens=4)))
        groups = dict(case.engine.generate(PROMPTS, SamplingParams(max_tokens=4)))
    assert_exact(case.model, [groups[index] for index in range(len(PROMPTS))], 1.0)


def test_after_weights_that_are_not_finite_the_next_are_sampled_from_exactly(case: Case) -> None:
    spoilt = {
        name: tensor * torch.nan if "up_proj" in name else tensor for name, tensor in case.model.state_dict().items()
    }
    with (
        case.engine.active(LocalWeights(spoilt.items(), next_version(case.engine))),
        pytest.raises(NonFiniteLogits, match="not finite"),
    ):
        list(case.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=4)))
    assert_exact(case.model, sample(case, SamplingParams(max_tokens=8, n=4)), 1.0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.0.nonsense.weight", (3, 3)), ("model.layers.0.self_attn.k_proj.weight", (3, 3)),
     ("model.norm.weight", (3,)), ("model.layers.1.mlp.down_proj.weight", (64, 3))],
)  # fmt: skip
def test_weights_of_another_model_are_refused_and_the_next_sync_mends_all(
    case: Case, name: str, shape: tuple[int, ...]
) -> None:
    sample(case, SamplingParams(max_tokens=1))  # so that the engine knows what comes
    wrong = {own: tensor + 1 for own, tensor in case.model.state_dict().items()} | {name: torch.zeros(shape)}
    with (
        pytest.raises(WeightsError, match=f"did not take weight version.*{re.escape(name)}"),
        case.engine.active(LocalWeights(wrong.items(), next_version(case.engine))),
    ):
        pass
    assert_exact(case.model, sample(case, SamplingParams(max_tokens=8)), 1.0)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.bias", "model.norm.weight",
     "model.embed_tokens.weight"],
)  # fmt: skip
def test_a_weight_that_does_not_come_is_named(case: Case, name: str) -> None:
    tied = {name, "lm_head.weight"} if "embed" in name else {name}
    weights = [(own, tensor) for own, tensor in case.model.state_dict().items() if own not in tied]
    with (
        pytest.raises(WeightsError, match=f"1 weights of the engine's model were not given: {re.escape(name)}"),
        case.engine.active(LocalWeights(weights, next_version(case.engine))),
    ):
        pass
    with pytest.raises(RuntimeError, match="active"):
        case.engine.generate(PROMPTS, SamplingParams(max_tokens=8))
    assert_exact(case.model, sample(case, SamplingParams(max_tokens=8)), 1.0)


def test_factors_alone_are_synced_over_the_last_full_weights(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    sample(case, SamplingParams(max_tokens=2))
    crossed = list[int]()

    def write(adapter: Adapter, folder: Path) -> Any:
        written = write_adapter(adapter, folder)
        crossed.append(bytes_in(folder))
        return written

    monkeypatch.setattr("r1_rollout.transports.adapter.write_adapter", write)
    monkeypatch.setattr("r1_rollout.vllm.sync.bring", None)  # nothing else crosses
    for seed in (1, 2):
        model, adapter = adapted(case.model, seed)
        with case.engine.active(LocalWeights(adapter, next_version(case.engine))):
            groups = dict(case.engine.generate(PROMPTS, SamplingParams(max_tokens=8, n=2)))
        assert crossed.pop() == adapter_bytes(adapter)
        assert_exact(model, [groups[index] for index in range(len(PROMPTS))], 1.0)
    monkeypatch.undo()
    assert_exact(case.model, sample(case, SamplingParams(max_tokens=8)), 1.0)  # a full sync drops the adapter


def test_an_adapter_that_binds_to_nothing_is_refused(case: Case) -> None:
    _, adapter = adapted(case.model, 1)
    elsewhere = {name.replace("layers.1", "layers.7"): tensor for name, tensor in adapter.weights}
    lost = Adapter(4, 8.0, adapter.target_modules, elsewhere.items())
    with (
        pytest.raises(WeightsError, match=r"bound to nothing.*layers\.7"),
        case.engine.active(LocalWeights(lost, next_version(case.engine))),
    ):
        pass


def test_many_syncs_samples_and_sleeps_keep_memory_flat(case: Case) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    weights = list(case.model.state_dict().items())

    def cycle(times: int) -> None:
        for _ in range(times):
            with case.engine.active(LocalWeights(weights, next_version(case.engine))):
                assert len(list(case.engine.generate(PROMPTS[:2], SamplingParams(max_tokens=3, n=2)))) == 2

    cycle(50)
    before = resident()
    cycle(200)
    assert resident() - before < 20 * 2**20


def test_a_prefix_cached_under_old_weights_is_not_used_again(case: Case) -> None:
    prompt = HandPrompt("same", list(range(1, 41)) * 2)
    for seed in (11, 12):
        model = make_model("qwen2 tied", seed)
        with case.engine.active(LocalWeights(model.state_dict().items(), next_version(case.engine))):
            for _ in range(2):
                ((_, (completion,)),) = case.engine.generate([prompt], SamplingParams(max_tokens=4))
                expected = plain_logprobs(model, prompt, completion.token_ids.tolist(), 1.0)
                torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=TOLERANCE, rtol=0)


def test_requests_of_a_session_get_the_tokens_of_generate_whatever_comes_and_goes(case: Case) -> None:
    params = SamplingParams(max_tokens=12, seed=3)
    expected = {
        f"{index} {name}": group[0].token_ids.tolist()
        for name, length in (("long", 12), ("short", 5))
        for index, group in enumerate(sample(case, replace(params, max_tokens=length)))
    }
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        session = case.engine.open_session(params)
        assert session.poll() == []
        found: dict[str, list[int]] = {}
        for index, prompt in enumerate(PROMPTS):
            session.submit(f"{index} long", prompt, max_tokens=12)
            session.submit(f"{index} apart", prompt, max_tokens=12, n=2, split=True)
            session.submit(f"{index} cancelled", prompt, max_tokens=12, n=2)
            found |= {key: one.token_ids.tolist() for key, (one,) in session.poll(0)}
            session.submit(f"{index} short", prompt, max_tokens=5)
            session.cancel(f"{index} cancelled")
        with pytest.raises(ValueError, match="0 short is pending already"):
            session.submit("0 short", PROMPTS[0], max_tokens=5)
        with pytest.raises(PromptError, match="is empty"):
            session.submit("bad", HandPrompt("p", []), max_tokens=5)
        while finished := session.poll(60):
            found |= {key: one.token_ids.tolist() for key, (one,) in finished}
    assert {f"{index} apart/{number}" for index in range(len(PROMPTS)) for number in (0, 1)} < found.keys()
    assert {key: found[key.replace("apart/0", "long")] for key in found if "apart/0" in key} == {
        key: found.pop(key) for key in list(found) if "apart/0" in key
    }
    assert {key: tokens for key, tokens in found.items() if "apart" not in key} == expected
    with pytest.raises(RuntimeError, match="its active block ended"):
        session.poll()


def test_a_later_call_ends_a_session_and_leaves_none_of_its_requests(case: Case) -> None:
    params = SamplingParams(max_tokens=40)
    with case.engine.active(LocalWeights(case.model.state_dict().items(), next_version(case.engine))):
        session = case.engine.open_session(params)
        session.submit("a", PROMPTS[0], max_tokens=40, n=2)
        assert session.poll(0) == []
        assert len(dict(case.engine.generate(PROMPTS, SamplingParams(max_tokens=2)))) == len(PROMPTS)
        with pytest.raises(RuntimeError, match="a later generate"):
            session.poll()
        assert not case.engine._llm.llm_engine.has_unfinished_requests()


def test_a_model_that_vllm_cannot_serve_is_said_so(tmp_path: Path) -> None:
    model = make_model("qwen2 tied")
    model.config.architectures = ["NobodysForCausalLM"]
    model.config.model_type = "nobodys"
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    with pytest.raises(EngineError, match="vLLM cannot start"):
        VllmEngine.load(str(tmp_path), end_token_ids={END}, dummy_weights=True, **STARTED)


def test_too_little_memory_for_the_cache_is_said_so(case: Case, tmp_path: Path) -> None:
    case.model.save_pretrained(tmp_path)
    options = {**STARTED, "kv_cache_bytes": 1 << 12}
    with pytest.raises(EngineError, match=r"vLLM cannot start.*max_model_len"):
        VllmEngine.load(str(tmp_path), end_token_ids={END}, dummy_weights=True, **options)


@pytest.fixture
def doomed(tmp_path: Path) -> Iterator[Case]:
    """An engine that a test may kill."""
    yield from start("qwen2 tied", tmp_path, deadline=60.0)


def test_an_engine_that_dies_mid_batch_is_said_so_and_no_group_comes_twice(
    doomed: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = doomed.engine._llm.llm_engine.step, []

    def dies() -> Any:
        calls.append(1)
        if len(calls) > 6:
            raise RuntimeError("kernel on fire")
        return step()

    monkeypatch.setattr(doomed.engine._llm.llm_engine, "step", dies)
    seen: list[int] = []
    weights = list(doomed.model.state_dict().items())

    def collect() -> None:
        with doomed.engine.active(LocalWeights(weights, 1)):
            for index, group in doomed.engine.generate(PROMPTS, SamplingParams(max_tokens=40, n=2, temperature=2.0)):
                seen.append(index)
                assert len(group) == 2

    with pytest.raises(EngineError, match=r"died in the middle of a batch.*kernel on fire"):
        collect()
    assert len(seen) == len(set(seen)) < len(PROMPTS)
    with pytest.raises(EngineError, match="died"), doomed.engine.active(LocalWeights(weights, 2)):
        pass


def test_an_engine_that_hangs_is_given_up_at_its_deadline(doomed: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    weights = list(doomed.model.state_dict().items())

    def wait() -> None:
        with doomed.engine.active(LocalWeights(weights, 1)):
            groups = doomed.engine.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
            monkeypatch.setattr(doomed.engine._llm.llm_engine, "step", release.wait)
            monkeypatch.setattr(doomed.engine, "_options", replace(doomed.engine._options, deadline=3.0))
            next(groups)

    with pytest.raises(EngineError, match=r"not answered for 3 s.*hangs"):
        wait()
    release.set()
