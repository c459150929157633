"""Every engine samples from the policy that the learner trains: the same log-probs, and never a token of media.

A further engine is a further name in `ENGINES`: a function from a model, with what ends an answer and what is never
sampled, to a `Generator`.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import families
import pytest
import torch
from family_prompts import make_learner, make_prompts

from r1_cli.models import end_token_ids, media_token_ids
from r1_cli.samples import Group, to_samples
from r1_core.learner import Learner
from r1_data.types import Prompt
from r1_rewards.types import Score
from r1_rollout.embedded import EmbeddedEngine
from r1_rollout.types import Completion, Generator, SamplingParams

MakeEngine = Callable[..., Any]
ENGINES = ("embedded",)
N = 3
PICTURES = (
    "picture first", "picture in the middle", "picture last", "pictures of several sizes", "the same picture twice",
    "messages of several turns with pictures in place",
)  # fmt: skip
VIDEOS = ("video last", "video whose time outruns the text", "videos of several rates", "videos around a picture")
SAMPLING = [
    SamplingParams(max_tokens=10, n=N),
    SamplingParams(max_tokens=10, n=N, temperature=0.7, seed=1),
    SamplingParams(max_tokens=10, n=N, temperature=0.7, top_p=0.8, seed=2),
    SamplingParams(max_tokens=10, n=N, top_k=5, top_p=0.9, seed=3),
]


@contextmanager
def embedded(model: Any, **rules: Any) -> Iterator[Generator]:
    yield EmbeddedEngine(copy.deepcopy(model), **rules)


@pytest.fixture(params=ENGINES)
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """Makes an engine beside a model: `with make_engine(model, end_token_ids=…, banned_token_ids=…) as engine`."""
    return {"embedded": embedded}[request.param]


def rules_of(model: Any) -> dict[str, frozenset[int]]:
    """What ends an answer and what is never sampled, as a run sets them."""
    tokenizer = families.make_tokenizer()
    banned = media_token_ids(model.config, tokenizer)
    return {"end_token_ids": end_token_ids(model.generation_config, tokenizer), "banned_token_ids": banned}


def sample(
    engine: Generator, learner: Learner, prompts: list[Prompt], params: SamplingParams
) -> list[list[Completion]]:
    with engine.awake(learner.weights(), 1):
        groups = dict(engine.generate(prompts, params))
    return [groups[index] for index in range(len(prompts))]


def assert_agreement(learner: Learner, prompts: list[Prompt], answers: list[list[Completion]]) -> None:
    groups = [Group(p, c, [""] * N, [Score(0.0)] * N, [0.0] * N) for p, c in zip(prompts, answers, strict=True)]
    for row, annotated in enumerate(learner.annotate_old(to_samples(groups))):
        mask, old, rollout = annotated.loss_mask, annotated.old_logprobs, annotated.rollout_logprobs
        assert old is not None
        assert rollout is not None
        gap = float((old[mask] - rollout[mask]).abs().max())
        assert gap < 1e-5, f"{prompts[row // N].id}, answer {row % N}: {gap}"


@pytest.mark.parametrize("family", [*families.TEXT_FAMILIES, *families.VISION_FAMILIES])
def test_the_engines_logprobs_are_the_learners(make_engine: MakeEngine, family: str) -> None:
    model, prompts = families.make_model(family), make_prompts(family, PICTURES)
    with make_engine(model, **rules_of(model)) as engine:
        for params in SAMPLING:
            learner = make_learner(model, temperature=params.temperature)
            answers = sample(engine, learner, prompts, params)
            assert len({tuple(a.token_ids) for group in answers for a in group}) > len(prompts), "all samples are alike"
            assert_agreement(learner, prompts, answers)


@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_the_engines_logprobs_are_the_learners_behind_videos(make_engine: MakeEngine, family: str) -> None:
    model, prompts = families.make_model(family), make_prompts(family, VIDEOS)
    with make_engine(model, **rules_of(model)) as engine:
        for params in SAMPLING:
            learner = make_learner(model, temperature=params.temperature)
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


@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("family", families.VISION_FAMILIES)
def test_tokens_of_media_are_never_sampled(make_engine: MakeEngine, family: str, temperature: float) -> None:
    model = families.make_model(family)
    favour_media(model)
    media = set(families.make_tokenizer().convert_tokens_to_ids(list(families.MEDIA_TOKENS)))
    rules, prompts = rules_of(model), make_prompts(family, PICTURES[:3])
    learner, params = make_learner(model), SamplingParams(max_tokens=10, n=N, temperature=temperature, ignore_eos=True)
    with make_engine(model, **{**rules, "banned_token_ids": ()}) as engine:
        free = sample(engine, learner, prompts, params)
    with make_engine(model, **rules) as engine:
        held = sample(engine, learner, prompts, params)
    assert all(answer.token_ids[0] in media for group in free for answer in group), "the model does not want them"
    assert not any(media & set(answer.token_ids) for group in held for answer in group)
