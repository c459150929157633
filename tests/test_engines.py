"""Every engine samples from the policy that the learner trains: the same log-probs, and never a token of media.

A further engine is a further function in `ENGINES`: from a model's folder, and the rules of a run for it, to a
`Generator` that lives as long as its block. One of each family is shared by all tests, each of which wakes it with
weights of its own.
"""

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from family_prompts import make_learner, make_prompts
from torch import Tensor

from r1_cli.train.groups.group import Group, Response, to_samples
from r1_core.learner import Learner
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.errors import WeightsError
from r1_rollout.tokens import end_token_ids, media_token_ids
from r1_rollout.types import Completion, Generator, SamplingParams
from r1_rollout.weights import LocalWeights

N = 3
PICTURES = (
    "picture first", "picture in the middle", "picture last", "pictures of several sizes", "the same picture twice",
    "messages of several turns with pictures in place",
)  # fmt: skip
VIDEOS = ("video last", "video whose time outruns the text", "videos of several rates", "videos around a picture")
PLAIN = SamplingParams(max_tokens=10, n=N)
SAMPLING = {
    "plain": PLAIN,
    "greedy": SamplingParams(max_tokens=10, n=N, temperature=0.0),
    "tempered": SamplingParams(max_tokens=10, n=N, temperature=0.7, seed=1),
    "top-p": SamplingParams(max_tokens=10, n=N, temperature=0.7, top_p=0.8, seed=2),
    "top-k": SamplingParams(max_tokens=10, n=N, top_k=5, top_p=0.9, seed=3),
    "min-p": SamplingParams(max_tokens=10, n=N, temperature=0.7, min_p=0.1, seed=4),
}
CUTS: list[dict[str, Any]] = [
    {"min_p": 0.3},
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1, "top_k": 4, "top_p": 0.7},
]
# Few prompts, as transformers' own recurrence is slow, and the rounding of 64 tokens at once against one by one.
RECURRENT = {"qwen3_5_text": 2e-5, "qwen3_5": 2e-5}
few_families = pytest.mark.parametrize("family", ["qwen2", "qwen2_5_vl"], indirect=True)  # where no model can matter


@contextmanager
def embedded(family: str, folder: Path, **rules: Any) -> Iterator[Generator]:
    yield EmbeddedEngine(families.make_model(family), tokenizer=families.make_tokenizer(), **rules)


@contextmanager
def vllm(family: str, folder: Path, **rules: Any) -> Iterator[Generator]:
    from r1_rollout.vllm.engine import VllmEngine

    path = families.save_model(family, folder)
    options = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "max_model_len": 1024, "dummy_weights": True}
    engine = VllmEngine.load(path, **options, **rules)
    yield engine
    engine.close()


VLLM_MARKS = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
ENGINES: list[Any] = [pytest.param(embedded, id="embedded"), pytest.param(vllm, id="vllm", marks=VLLM_MARKS)]
MakeEngine = Callable[..., AbstractContextManager[Generator]]


@pytest.fixture(scope="module", params=[*families.TEXT_FAMILIES, *families.VISION_FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    make_engine: MakeEngine = request.param
    if make_engine is vllm and family in RECURRENT:
        pytest.skip("vLLM's recurrence on processors takes bfloat16 alone")
    with make_engine(family, tmp_path_factory.mktemp(family), **rules_of(family)) as made:
        yield made


def rules_of(family: str) -> dict[str, frozenset[int]]:
    """What ends an answer and what is never sampled, as a run sets them."""
    model, tokenizer = families.make_model(family), families.make_tokenizer()
    banned = media_token_ids(model.config, tokenizer)
    return {
        "end_token_ids": end_token_ids(model.generation_config, model.config, tokenizer),
        "banned_token_ids": banned,
    }


def learner_of(model: Any, params: SamplingParams) -> Learner:
    """A learner that reports as engines do, which take greedy answers at temperature 1."""
    return make_learner(model, temperature=params.temperature or 1.0)


def sample(
    engine: Generator, learner: Learner, prompts: Sequence[Prompt], params: SamplingParams
) -> list[list[Completion]]:
    with engine.active(LocalWeights(learner.weights(), 1)):
        groups = dict(engine.generate(prompts, params))
    return [groups[index] for index in range(len(prompts))]


def assert_agreement(learner: Learner, prompts: list[Prompt], answers: list[list[Completion]]) -> None:
    groups = [
        Group(prompt, [Response(completion, "", Score(0.0), 0.0) for completion in completions])
        for prompt, completions in zip(prompts, answers, strict=True)
    ]
    for row, annotated in enumerate(learner.add_logprobs(to_samples(groups), ["old_logprobs"])):
        mask, old, rollout = annotated.loss_mask, annotated.old_logprobs, annotated.rollout_logprobs
        assert old is not None
        assert rollout is not None
        gap = float((old[mask] - rollout[mask]).abs().max())
        assert gap < RECURRENT.get(learner.model.config.model_type, 1e-5), (
            f"{prompts[row // N].id}, answer {row % N}: {gap}"
        )


def gaps_of(learner: Learner, prompts: list[Prompt], answers: list[list[Completion]]) -> Tensor:
    """The differences of all tokens' log-probs, in nats."""
    groups = [
        Group(prompt, [Response(completion, "", Score(0.0), 0.0) for completion in completions])
        for prompt, completions in zip(prompts, answers, strict=True)
    ]
    found = learner.add_logprobs(to_samples(groups), ["old_logprobs"])
    return torch.cat([(one.old_logprobs - one.rollout_logprobs)[one.loss_mask].abs() for one in found])


SAMPLED = [*families.TEXT_FAMILIES, *families.VISION_FAMILIES, *RECURRENT]


@pytest.mark.parametrize(
    ("family", "params"),
    [
        pytest.param(family, params, id=f"{family}-{name}")
        for place, family in enumerate(SAMPLED)
        for number, (name, params) in enumerate(SAMPLING.items())
        # Every way for a model of text and one of pictures, and the plain one and another for each.
        if family in ("qwen2", "qwen2_5_vl") or number in (0, 1 + place % (len(SAMPLING) - 1))
    ],
    indirect=["family"],
)
def test_the_engines_logprobs_are_the_learners(engine: Generator, family: str, params: SamplingParams) -> None:
    pictures = PICTURES[:2] if family in RECURRENT else PICTURES
    learner, prompts = learner_of(families.make_model(family), params), make_prompts(family, pictures)
    answers = sample(engine, learner, prompts, params)
    different = len({tuple(a.token_ids.tolist()) for group in answers for a in group})
    assert different > len(prompts) or params.temperature == 0, "all samples are alike"
    assert_agreement(learner, prompts, answers)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("name", RECURRENT)
def test_vllm_samples_from_qwen3_5_in_half_precision(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its recurrence on processors takes bfloat16 alone, and heads of a published size."""
    from r1_rollout.vllm.engine import VllmEngine

    for part in ("key_head_dim", "value_head_dim"):
        monkeypatch.setitem(families.LINEAR_ATTENTION, part, 128)
    model = families.make_model(name, scale=1.0)
    path = families.save_model(name, tmp_path, model)
    options = {"dtype": "bfloat16", "kv_cache_bytes": 1 << 26, "max_model_len": 1024, "dummy_weights": True}
    engine = VllmEngine.load(path, **options, **rules_of(name))
    learner, prompts = learner_of(model, PLAIN), make_prompts(name, PICTURES[:2])
    try:
        answers = sample(engine, learner, prompts, PLAIN)
    finally:
        engine.close()
    gaps = gaps_of(learner, prompts, answers)  # 0.0005 on average, 0.0024 at most, when this was written
    assert gaps.mean() < 0.002
    assert gaps.max() < 0.01


@pytest.mark.parametrize("family", families.VISION_FAMILIES, indirect=True)
def test_the_engines_logprobs_are_the_learners_behind_videos(engine: Generator, family: str) -> None:
    prompts = make_prompts(family, VIDEOS)
    for params in (SAMPLING["greedy"], SAMPLING["tempered"]):
        learner = learner_of(families.make_model(family), params)
        assert_agreement(learner, prompts, sample(engine, learner, prompts, params))


def favour_media(model: Any) -> None:
    """Let the model want nothing but the tokens of media, whatever it reads.

    One channel is large in every token's embedding, so it is what is left of a token after the last norm, and the head
    reads it for these tokens alone.
    """
    favoured = families.make_tokenizer().convert_tokens_to_ids(list(families.MEDIA_TOKENS))
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 1000.0
        model.lm_head.weight[favoured, 0] = 20.0


@torch.no_grad()
def said_next(model: Any, token_ids: Sequence[int], temperature: float) -> Tensor:
    """Probabilities [tokens, vocabulary] of what follows each of the tokens."""
    return (model(torch.tensor([token_ids])).logits[0] / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_tokens_of_media_are_never_sampled(engine: Generator, family: str, temperature: float) -> None:
    model = families.make_model(family)
    favour_media(model)
    media = families.make_tokenizer().convert_tokens_to_ids(list(families.MEDIA_TOKENS))
    prompts = make_prompts(family, PICTURES[:3])
    assert said_next(model, prompts[-1].token_ids, 1.0)[-1, media].sum() > 0.999, "the model does not want them"
    params = SamplingParams(max_tokens=10, n=N, temperature=temperature, ignore_eos=True)
    answers = sample(engine, make_learner(model), prompts, params)
    assert not any({*media} & {*answer.token_ids.tolist()} for group in answers for answer in group)


@few_families
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_a_cut_leaves_the_likeliest_tokens(engine: Generator, family: str, cut: dict[str, Any]) -> None:
    model, prompts = families.make_model(family), make_prompts(family, ())
    params = SamplingParams(max_tokens=10, n=8, temperature=0.7, ignore_eos=True, **cut)
    banned, ranks = sorted(rules_of(family)["banned_token_ids"]), []
    for prompt, group in zip(prompts, sample(engine, learner_of(model, params), prompts, params), strict=True):
        for answer in group:
            probs = said_next(model, [*prompt.token_ids, *answer.token_ids.tolist()], 0.7)[
                len(prompt.token_ids) - 1 : -1
            ]
            probs[:, banned] = 0.0
            own = probs.gather(1, torch.tensor(answer.token_ids)[:, None])
            larger = torch.where(probs > own, probs, 0.0)
            ranks += (probs > own).sum(-1).tolist()
            assert (own[:, 0] > params.min_p * probs.amax(-1) * 0.999).all()
            assert max(ranks) < (params.top_k if params.top_k > 0 else 272)
            kept = torch.where(probs >= params.min_p * probs.amax(-1, keepdim=True), probs, 0.0)
            if params.top_k > 0:
                kept = kept.topk(params.top_k).values
            assert (larger.sum(-1) < params.top_p * kept.sum(-1) * 1.001).all()
    assert max(ranks) > 0, "nothing but the likeliest token was sampled"


def ended_by(answer: Completion, tokens: Sequence[int], string: str | None, limit: int) -> tuple[list[int], str]:
    """What is left of an answer that nothing ended, and how it ends: at these tokens, behind the string, or cut off."""
    tokenizer = families.make_tokenizer()
    for length in range(1, limit + 1):
        said = answer.token_ids[:length].tolist()
        text = tokenizer.decode(said, skip_special_tokens=False)
        if said[-1] in tokens or (string is not None and string in text):
            return said, "stop"
    return answer.token_ids[:limit].tolist(), "length"


def strings_said(answers: list[list[Completion]]) -> tuple[str, str]:
    """Two letters in a row that an answer has behind its first token, and the name of a special token that one has."""
    tokenizer, said = families.make_tokenizer(), [answer.token_ids.tolist() for group in answers for answer in group]
    pairs = [tokenizer.decode(pair) for tokens in said for pair in pairwise(tokens[1:])]
    special = next(token for tokens in said for token in tokens[1:] if token in tokenizer.all_special_ids)
    return next(pair for pair in pairs if all(33 <= ord(c) < 127 for c in pair)), tokenizer.decode([special])


@few_families
def test_an_answer_ends_with_the_token_that_ends_it(engine: Generator, family: str) -> None:
    """At stop tokens, at end tokens, behind the token that completes a stop string; or at its longest."""
    prompts, rules = make_prompts(family, PICTURES[:2]), rules_of(family)
    learner = make_learner(families.make_model(family))
    free = SamplingParams(max_tokens=24, n=8, ignore_eos=True)
    answers = sample(engine, learner, prompts, free)
    stops = tuple(answers[0][0].token_ids[2:4].tolist())
    pair, special = strings_said(answers)
    for limit, tokens, string, ignore_eos in [
        (24, stops, None, True),
        (24, stops, None, False),
        (24, (), pair, True),
        (24, stops, pair, False),
        (24, (), special, True),
        (3, stops, pair, True),  # what ends an answer may be its last token
    ]:
        params = SamplingParams(
            max_tokens=limit, n=8, ignore_eos=ignore_eos, stop_token_ids=tokens,
            stop=(string, "never said, as it is longer than an answer") if string else (),
        )  # fmt: skip
        ends = {*tokens, *(() if ignore_eos else rules["end_token_ids"])}
        for expected, group in zip(answers, sample(engine, learner, prompts, params), strict=True):
            assert [(a.token_ids.tolist(), a.finish_reason) for a in group] == [
                ended_by(a, tuple(ends), string, limit) for a in expected
            ]
            assert all(len(a.logprobs) == len(a.token_ids) for a in group)


def test_a_weight_that_does_not_come_is_named(engine: Generator, family: str) -> None:
    weights = dict(make_learner(families.make_model(family)).weights())
    for part in ("layers.1.mlp.up_proj", "layers.0.self_attn.o_proj", "visual.blocks.0.attn.qkv", "lm_head"):
        absent = {name for name in weights if f"{part}.weight" in name}
        assert len(absent) == 1 or (part.startswith("visual") and family in families.TEXT_FAMILIES)
        if absent:
            rest = [(name, tensor) for name, tensor in weights.items() if name not in absent]
            with (
                pytest.raises(WeightsError, match=rf"not given: .*{re.escape(part)}"),
                engine.active(LocalWeights(rest, 1)),
            ):
                pass
