"""The embedded engine against plain forwards of the same model, and its manners."""

import gc
import weakref
from collections import UserDict
from itertools import chain
from typing import Any

import pytest
import torch
from embedded_cases import (
    END,
    MEDIA,
    HandPrompt,
    assert_exact,
    copy_of,
    engine_for,
    forward_logits,
    mixed_prompts,
    picture_prompt,
    plain_logprobs,
    sample,
    text_prompt,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.embedded.kv import GroupCache
from r1_rollout.embedded.prefill import alike
from r1_rollout.errors import WeightsError
from r1_rollout.types import Drainable, Generator, SamplingParams
from r1_rollout.weights import LocalWeights


@pytest.fixture(params=["text_model", "vision_model"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("max_sequences", [64, 5])
def test_logprobs_equal_a_plain_forward_of_each_sequence_alone(model, temperature, max_sequences):
    prompts, params = mixed_prompts(model), SamplingParams(max_tokens=12, n=3, temperature=temperature)
    assert_exact(model, prompts, sample(model, prompts, params, max_sequences=max_sequences), temperature)


@pytest.mark.parametrize("max_sequences", [64, 5])
def test_logprobs_stay_exact_while_rows_end_at_every_length(model, max_sequences):
    prompts, params = mixed_prompts(model), SamplingParams(max_tokens=12, n=5)
    groups = sample(model, prompts, params, max_sequences=max_sequences, end_token_ids=range(12))
    assert_exact(model, prompts, groups, 1.0)
    assert {1, 2, 3, 12} <= {len(completion.token_ids) for completion in chain.from_iterable(groups)}


def test_greedy_takes_the_likeliest_allowed_token(model):
    prompts = mixed_prompts(model)
    for prompt, (completion,) in zip(
        prompts, sample(model, prompts, SamplingParams(max_tokens=8, temperature=0)), strict=True
    ):
        logits = forward_logits(model, prompt, completion.token_ids.tolist())
        logits[:, list(MEDIA)] = -torch.inf
        assert completion.token_ids.tolist() == logits.argmax(-1).tolist()


def test_the_picture_is_seen(vision_model):
    prompt = picture_prompt(vision_model, "p", 4, [(1, 8, 8)])
    blank = HandPrompt("p", prompt.token_ids, prompt.position_ids, {**prompt.model_inputs})
    blank.model_inputs["pixel_values"] = torch.zeros_like(prompt.model_inputs["pixel_values"])  # type: ignore[index]
    (seen,), (unseen,) = sample(vision_model, [prompt, blank], SamplingParams(max_tokens=1, temperature=0))
    assert seen.logprobs.tolist() != unseen.logprobs.tolist()


def test_inputs_that_are_elsewhere_are_fetched_when_the_prompt_is_begun(vision_model):
    class Fetched(UserDict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            return self.data[name]

    plain = picture_prompt(vision_model, "p", 4, [(1, 8, 8)])
    prompt = HandPrompt("p", plain.token_ids, plain.position_ids, Fetched(plain.model_inputs))
    params = SamplingParams(max_tokens=3, n=2)
    assert sample(vision_model, [prompt], params) == sample(vision_model, [plain], params)
    assert prompt.model_inputs.reads == len(plain.model_inputs)


@pytest.mark.parametrize("max_sequences", [64, 4])
def test_a_samples_tokens_do_not_depend_on_the_rest_of_the_batch(model, max_sequences):
    prompts = mixed_prompts(model)
    params = SamplingParams(max_tokens=10, n=4, seed=5)
    together = sample(model, prompts, params, max_sequences=max_sequences)
    backwards = sample(model, prompts[::-1], params)[::-1]
    for index, prompt in enumerate(prompts):
        (alone,) = sample(model, [prompt], params)
        tokens = [completion.token_ids.tolist() for completion in alone]
        assert [completion.token_ids.tolist() for completion in together[index]] == tokens
        assert [completion.token_ids.tolist() for completion in backwards[index]] == tokens


def test_the_same_call_gives_the_same_bits(model):
    prompts, params = mixed_prompts(model), SamplingParams(max_tokens=10, n=3)
    assert sample(model, prompts, params) == sample(model, prompts, params)


def test_a_longer_limit_only_lengthens_answers(text_model):
    prompts = mixed_prompts(text_model)
    short, long = (sample(text_model, prompts, SamplingParams(max_tokens=m, n=2)) for m in (3, 9))
    for before, after in zip(chain.from_iterable(short), chain.from_iterable(long), strict=True):
        assert after.token_ids[:3].tolist() == before.token_ids.tolist()


@pytest.mark.parametrize("change", [{"seed": 1}, {"id": "other"}])
def test_seed_and_prompt_id_change_the_samples(text_model, change):
    prompt = text_prompt("p", 6)
    other = HandPrompt(change.get("id", "p"), prompt.token_ids, prompt.position_ids)
    base = SamplingParams(max_tokens=8, n=4, ignore_eos=True)
    changed = SamplingParams(max_tokens=8, n=4, ignore_eos=True, seed=change.get("seed", 0))
    first, second = sample(text_model, [prompt], base), sample(text_model, [other], changed)
    assert all(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(first[0], second[0], strict=True))
    assert len({tuple(completion.token_ids.tolist()) for completion in first[0]}) == 4


def test_answers_end_at_an_end_token_or_at_the_limit(text_model):
    groups = sample(text_model, mixed_prompts(text_model), SamplingParams(max_tokens=20, n=8))
    reasons = set()
    for completion in chain.from_iterable(groups):
        reasons.add(completion.finish_reason)
        assert completion.weight_version == 3
        assert len(completion.logprobs) == len(completion.token_ids)
        assert END not in completion.token_ids[:-1].tolist()
        assert (completion.token_ids[-1] == END) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 20
    assert reasons == {"stop", "length"}


def test_ignore_eos_runs_every_answer_to_the_limit(text_model):
    groups = sample(text_model, mixed_prompts(text_model), SamplingParams(max_tokens=20, n=8, ignore_eos=True))
    assert {(len(c.token_ids), c.finish_reason) for c in chain.from_iterable(groups)} == {(20, "length")}
    assert any(END in c.token_ids[:-1].tolist() for c in chain.from_iterable(groups))


def test_banned_tokens_are_never_sampled(vision_model):
    prompts, params = mixed_prompts(vision_model), SamplingParams(max_tokens=20, n=8, temperature=3.0)
    free = sample(vision_model, prompts, params, banned_token_ids=())
    assert any(token in MEDIA for completion in chain.from_iterable(free) for token in completion.token_ids.tolist())
    held = sample(vision_model, prompts, params)
    assert not any(
        token in MEDIA for completion in chain.from_iterable(held) for token in completion.token_ids.tolist()
    )


def test_a_group_is_yielded_once_it_is_finished(text_model):
    engine: Generator = engine_for(text_model, max_sequences=4)
    prompts = [text_prompt(f"p{i}", 5 + i) for i in range(6)]
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        groups = engine.generate(prompts, SamplingParams(max_tokens=6, n=2))
        first, _ = next(groups)
        calls = count_forwards(engine)
        rest = [index for index, _ in groups]
    assert sorted([first, *rest]) == list(range(6))
    assert calls, "everything had been sampled before the first group was handed out"


def count_forwards(engine: EmbeddedEngine) -> list[int]:
    """Rows of each forward from here on."""
    rows: list[int] = []
    engine._model.register_forward_pre_hook(lambda m, args, kw: rows.append(len(kw["input_ids"])), with_kwargs=True)
    return rows


def test_a_prompt_is_prefilled_once_and_max_sequences_bounds_the_rows(text_model):
    engine = engine_for(text_model, max_sequences=7)
    prompted: list[int] = []
    rows: list[int] = []

    def watch(module: Any, args: Any, kwargs: Any) -> None:
        (prompted if "logits_to_keep" in kwargs else rows).append(len(kwargs["input_ids"]))

    engine._model.register_forward_pre_hook(watch, with_kwargs=True)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        list(engine.generate([text_prompt(f"p{i}", 4) for i in range(20)], SamplingParams(max_tokens=6, n=3)))
    assert sum(prompted) == 20
    assert max(rows) <= 7
    assert min(rows) < 6, "finished rows were kept in the batch"


def test_new_weights_are_used_and_stamped(text_model):
    engine, prompt = engine_for(text_model), text_prompt("p", 6)
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    answers = []
    for version, scale in enumerate((1.0, -1.0)):
        with engine.active(LocalWeights(((k, v * scale) for k, v in text_model.state_dict().items()), version)):
            ((_, (completion,)),) = engine.generate([prompt], params)
        assert completion.weight_version == version
        answers.append(completion.token_ids.tolist())
    assert answers[0] != answers[1]


def test_tied_weights_come_without_the_output_layer(text_model):
    tied = Qwen2ForCausalLM(Qwen2Config(**{**text_model.config.to_dict(), "tie_word_embeddings": True}))
    weights = [(name, tensor) for name, tensor in tied.state_dict().items() if name != "lm_head.weight"]
    engine, prompt = engine_for(tied), text_prompt("p", 6)
    with engine.active(LocalWeights(weights, 0)):
        ((_, (completion,)),) = engine.generate([prompt], SamplingParams(max_tokens=5))
    expected = plain_logprobs(tied.eval(), prompt, completion.token_ids.tolist(), 1.0)
    torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=2e-6, rtol=2e-6)


def test_wrong_weights_leave_the_engine_asleep(text_model):
    engine = engine_for(text_model)
    weights = dict(text_model.state_dict())
    del weights["model.norm.weight"]
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"), engine.active(LocalWeights(weights.items(), 0)):
        pass
    with pytest.raises(RuntimeError, match="active"):
        engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=2))
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        assert list(engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=2)))


def test_sampling_needs_an_awake_engine(text_model):
    engine = engine_for(text_model)
    with pytest.raises(RuntimeError, match="needs an active engine"):
        engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=2))
    again = engine.active(LocalWeights(text_model.state_dict().items(), 5))
    with (
        engine.active(LocalWeights(text_model.state_dict().items(), 4)),
        pytest.raises(RuntimeError, match="weight version 4"),
        again,
    ):
        pass


def test_stopping_early_leaves_the_engine_usable(text_model):
    engine = engine_for(text_model, max_sequences=4)
    prompts, params = [text_prompt(f"p{i}", 5) for i in range(6)], SamplingParams(max_tokens=6, n=2)
    expected = sample(text_model, prompts, params)
    with engine.active(LocalWeights(text_model.state_dict().items(), 3)):
        for _ in engine.generate(prompts, params):
            break
        abandoned = engine.generate(prompts, params)
        next(abandoned)
        again = dict(engine.generate(prompts, params))
        with pytest.raises(RuntimeError, match="a later generate"):
            list(abandoned)
    tokens = [[completion.token_ids.tolist() for completion in again[index]] for index in range(6)]
    assert tokens == [[completion.token_ids.tolist() for completion in group] for group in expected]


def test_the_cache_is_freed_when_the_engine_falls_asleep(text_model):
    engine = engine_for(text_model, max_sequences=2)
    gc.collect()
    others = {id(o) for o in gc.get_objects() if type(o) is GroupCache}  # of other tests' engines
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        groups = engine.generate([text_prompt(f"p{i}", 5) for i in range(4)], SamplingParams(max_tokens=6, n=2))
        next(groups)
        caches = [weakref.ref(o) for o in gc.get_objects() if type(o) is GroupCache and id(o) not in others]
        assert any(ref() is not None for ref in caches)
    gc.collect()
    assert all(ref() is None for ref in caches)
    with pytest.raises(RuntimeError, match="active block ended"):
        list(groups)


def test_no_gradient_and_no_inference_mode_leak_to_the_consumer(text_model):
    engine = engine_for(text_model)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        for _ in engine.generate([text_prompt("p", 5), text_prompt("q", 6)], SamplingParams(max_tokens=3)):
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
    assert not any(parameter.requires_grad for parameter in engine._model.parameters())


def test_a_half_precision_engine_takes_float32_weights(text_model):
    engine = EmbeddedEngine(copy_of(text_model).to(torch.bfloat16), end_token_ids={END})
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        ((_, group),) = engine.generate([text_prompt("p", 5)], SamplingParams(max_tokens=8, n=4))
    assert all(logprob < 0 for completion in group for logprob in completion.logprobs.tolist())


def test_nan_weights_are_reported_with_prompt_and_version(text_model):
    engine = engine_for(text_model)
    weights = {**text_model.state_dict(), "model.norm.weight": torch.full((48,), torch.nan)}
    with (
        engine.active(LocalWeights(weights.items(), 12)),
        pytest.raises(FloatingPointError, match=r"prompt p5.*version 12"),
    ):
        list(engine.generate([text_prompt("p5", 5)], SamplingParams(max_tokens=2)))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        (HandPrompt("p", [], torch.zeros(1, 0, dtype=torch.int64)), {}, "prompt p is empty"),
        (HandPrompt("p", [1, 2], torch.zeros(1, 3, dtype=torch.int64)), {}, r"prompt p: .*\[1, 3\], expected \[1, 2\]"),
        (HandPrompt("p", [1, 2], torch.zeros(1, 2, dtype=torch.int64)), {"n": 9}, "n=9 .* max_sequences=8"),
        (text_prompt("p", 255), {}, "prompt p ends at position 255 .* 2 tokens, but the model knows 256 positions"),
    ],
)
def test_impossible_calls_are_refused_before_sampling(text_model, prompt, params, message):
    engine = engine_for(text_model, max_sequences=8)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)), pytest.raises(ValueError, match=message):
        engine.generate([prompt], SamplingParams(max_tokens=2, **params))


def test_prompts_of_different_position_axes_are_refused(text_model):
    engine = engine_for(text_model)
    four = HandPrompt("four", [1, 2], torch.arange(2).expand(4, 2))
    with (
        engine.active(LocalWeights(text_model.state_dict().items(), 0)),
        pytest.raises(ValueError, match=r"prompt four: .*1 axes"),
    ):
        engine.generate([text_prompt("one", 2), four], SamplingParams(max_tokens=2))


def test_no_prompts_give_no_groups(text_model):
    engine = engine_for(text_model)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        assert list(engine.generate([], SamplingParams(max_tokens=2))) == []


def test_tokens_that_could_not_end_an_answer_are_refused(text_model):
    with pytest.raises(ValueError, match=r"tokens \[7\] are both end tokens and banned"):
        engine_for(text_model, banned_token_ids={END, 8})


def test_a_drained_engine_finishes_what_it_has_begun_and_begins_no_more(text_model):
    prompts = [text_prompt(str(i), 4 + i) for i in range(8)]
    params = SamplingParams(max_tokens=6, n=2, seed=3, ignore_eos=True)
    engine = engine_for(text_model, max_sequences=4)
    assert isinstance(engine, Drainable)
    engine.drain()  # asleep: nothing to do
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        whole = dict(engine.generate(prompts, params))
        running = engine.generate(prompts, params)
        found = dict([next(running)])
        engine.drain()
        found |= dict(running)
        assert 1 < len(found) < 8
        assert found == {index: whole[index] for index in range(len(found))}
        engine.drain()  # over: nothing to do
        assert dict(engine.generate(prompts, params)) == whole


def test_prompts_whose_inputs_cannot_be_concatenated_are_computed_apart() -> None:
    small, large = {"pixel_values": torch.zeros(1, 3, 8, 8)}, {"pixel_values": torch.zeros(2, 3, 16, 8)}
    nine, eight = {"token_type_ids": torch.zeros(1, 9)}, {"token_type_ids": torch.zeros(1, 8)}  # one number a token
    inputs = [small | nine, large | nine, {}, large | eight, small | nine, large | eight]
    assert alike(inputs) == [[0, 2, 4], [1], [3, 5]]
