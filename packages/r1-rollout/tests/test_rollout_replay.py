"""Log-probs of given answers by the engine's own path, and the attention that it decodes with."""

from typing import Any

import pytest
import torch
from embedded_cases import END, assert_exact, engine_for, mixed_prompts, plain_logprobs, sample, text_prompt
from torch.nn import functional as F

from r1_rollout.embedded.attention import decode_attention
from r1_rollout.embedded.prefill import prefill_batches
from r1_rollout.embedded.segments import Readers, Sight
from r1_rollout.embedded.softmax import LOG2_E, AttentionPart, attend
from r1_rollout.types import Replaying, SamplingParams
from r1_rollout.weights import LocalWeights


@pytest.fixture(params=["text_model", "vision_model"])
def model(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("max_sequences", [64, 2])
def test_scores_equal_a_plain_forward_of_each_sequence_alone(model, temperature, max_sequences):
    engine: Any = engine_for(model, max_sequences=max_sequences)
    prompts = mixed_prompts(model)
    generator = torch.Generator().manual_seed(3)
    responses = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in (7, 1, 0, 12, 3)]
    with engine.active(LocalWeights(model.state_dict().items(), 0)):
        scoring: Replaying = engine
        scores = scoring.logprobs_of(prompts, responses, temperature)
    assert [len(score) for score in scores] == [7, 1, 0, 12, 3]
    for prompt, response, score in zip(prompts, responses, scores, strict=True):
        if response:
            expected = plain_logprobs(model, prompt, response, temperature)
            torch.testing.assert_close(torch.tensor(score), expected, atol=2e-6, rtol=2e-6)


def test_scores_are_those_that_were_reported_when_sampling(text_model):
    prompts = mixed_prompts(text_model)
    groups = sample(text_model, prompts, SamplingParams(max_tokens=9, n=1, temperature=0.8))
    engine = engine_for(text_model)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        scores = engine.logprobs_of(prompts, [group[0].token_ids for group in groups], 0.8)
    for (completion,), score in zip(groups, scores, strict=True):
        assert score == pytest.approx(completion.logprobs.tolist(), abs=2e-6)


def test_scoring_leaves_an_unfinished_call_alone(text_model):
    prompts, params = mixed_prompts(text_model), SamplingParams(max_tokens=9, n=2)
    engine = engine_for(text_model, max_sequences=4)
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        groups = engine.generate(prompts, params)
        first = next(groups)
        assert len(engine.logprobs_of(prompts[:1], [[1, 2, 3]])[0]) == 3
        answers = dict([first, *groups])
    expected = sample(text_model, prompts, params)
    for index, group in answers.items():
        assert [c.token_ids.tolist() for c in group] == [c.token_ids.tolist() for c in expected[index]]


def test_a_replay_is_refused_where_it_cannot_be_right(text_model):
    engine, prompt = engine_for(text_model), text_prompt("p", 3)
    with pytest.raises(RuntimeError, match=r"logprobs_of\(\) needs an active engine"):
        engine.logprobs_of([prompt], [[1]])
    with engine.active(LocalWeights(text_model.state_dict().items(), 0)):
        assert engine.logprobs_of([], []) == []
        with pytest.raises(ValueError, match="1 prompts and 2 responses"):
            engine.logprobs_of([prompt], [[1], [2]])
        with pytest.raises(ValueError, match="prompt p: response token 64 is outside the vocabulary of 64"):
            engine.logprobs_of([prompt], [[1, 64]])


def test_logprobs_stay_exact_in_long_answers_of_mixed_ages(text_model):
    prompts = [text_prompt(f"p{i}", 3 + 5 * i) for i in range(6)]
    params = SamplingParams(max_tokens=150, n=3)
    groups = sample(text_model, prompts, params, max_sequences=9, end_token_ids={END, 8})
    assert_exact(text_model, prompts, groups, 1.0)
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    assert max(lengths) > 64 > min(lengths), "answers did not outgrow the first room, or none ended early"


def test_attention_in_parts_is_that_over_all_columns():
    query, key, value = (torch.randn(3, 2, length, 8) for length in (4, 10, 10))
    key[:, :, 4:] *= 100  # scores of hundreds, whose powers are infinite without the second part's peak
    bias = torch.zeros(3, 1, 1, 10)
    bias[1, ..., 3:6] = -torch.inf
    everyone = Readers(True, *[torch.arange(3)] * 3)
    parts = [
        AttentionPart(key.transpose(2, 3), value, Sight(columns, -torch.inf, bias[..., columns]), everyone)
        for columns in (slice(0, 4), slice(4, 10))
    ]
    torch.testing.assert_close(
        attend(LOG2_E * query / 8**0.5, parts), F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    )


def test_a_model_that_changes_the_keys_behind_the_cache_is_refused(text_model, monkeypatch):
    engine = engine_for(text_model)
    engine._stack = None  # as with a family that is not known: its layers attend by themselves
    layer = engine._model.model.layers[0].self_attn

    def scaled(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return decode_attention(module, query, key * 2, value, mask, **kwargs)

    monkeypatch.setattr("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface", lambda *_: scaled)
    with (
        engine.active(LocalWeights(text_model.state_dict().items(), 0)),
        pytest.raises(RuntimeError, match=f"{type(layer).__name__} does not attend to the keys as its cache gave them"),
    ):
        list(engine.generate([text_prompt("p", 3)], SamplingParams(max_tokens=3, ignore_eos=True)))


def test_prompts_are_batched_by_length_within_bounds():
    lengths = [5, 9000, 7, 20000, 6] + [100] * 40
    batches = prefill_batches(lengths)
    assert sorted(index for batch in batches for index in batch) == list(range(45))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) <= 16
        assert len(batch) == 1 or len(batch) * longest <= 16384
        assert longest in (20000, 9000) or min(lengths[index] for index in batch) * 20 >= longest
