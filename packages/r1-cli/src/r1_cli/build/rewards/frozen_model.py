"""A frozen model in the run's process whose log-probs a reward reads."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from r1_cli.build.rewards.own_models import to_read
from r1_cli.build.teacher_model import find_difference
from r1_cli.config import RunConfig
from r1_cli.hardware import Hardware
from r1_cli.models import load as models
from r1_cli.models.families import is_vision_language
from r1_cli.models.files import ModelFiles
from r1_core.learner.batching import Batching
from r1_core.learner.logprobs import compute_eager_logprobs
from r1_core.learner.microbatch import MicroBatch
from r1_core.learner.parallel import Parallel
from r1_core.learner.passes import Passes
from r1_core.learner.token_model import TokenModel
from r1_core.types import Sample
from r1_rollout.types import PromptLike
from r1_rollout.weight_checks import learn_tolerance, widest_gap

if TYPE_CHECKING:
    from r1_rollout.types import Tokens


PROBES = ("What is 7 times 8? 56.", "A list of animals, longer than the text before: a cat, a dog and two birds.")


class FrozenReading:
    """A frozen model that scores responses, padded, one forward pass per prompt.

    A response's log-probs do not depend on other requests, so it may be called during sampling.
    """

    concurrent = True

    def __init__(self, model: Any, batching: Batching, device: torch.device) -> None:
        self._model = model.requires_grad_(False).eval()
        self._tokens = TokenModel(self._model)
        self._passes = Passes(batching, Parallel(), (), device)
        self._batching, self._device = batching, device

    def require_right(self, texts: Sequence[list[int]], dtype: torch.dtype) -> None:
        """Compare a padded batch with the model's own eager forward; use single texts if it is wrong.

        Raises:
            ValueError: single texts are wrong, too.
        """
        samples = list(map(_to_sample, texts))
        expected = compute_eager_logprobs(self._model, samples)
        noise = widest_gap(compute_eager_logprobs(self._model, samples, noise=dtype), expected)
        tolerance = learn_tolerance(noise, dtype)
        for single in (self._batching.single, True):
            self._passes = Passes(replace(self._batching, single=single), Parallel(), (), self._device)
            gap = widest_gap(self._measure(samples, 1.0), expected)
            if gap <= tolerance:
                return
        raise ValueError(f"its log-probs are off by {gap:.2g} of their size, of its own eager attention's")

    def read_logprobs(
        self,
        prompts: Sequence[PromptLike],
        responses: "Sequence[Tokens]",
        starts: Sequence[int],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        found: list[list[float]] = []
        for samples in _by_prompt(prompts, responses, starts):
            found += self._measure(samples, temperature)
        return found

    def read_top(
        self, prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", count: int, temperature: float
    ) -> list[Tensor]:
        """Return of each response's tokens what `TokenModel.top` gives, [n, 1 + 2 · count]."""

        def stats_of(batch: MicroBatch) -> Tensor:
            return self._tokens.top(batch, count, temperature)

        found: list[Tensor] = []
        for samples in _by_prompt(prompts, responses, [0] * len(responses)):
            found += self._compute(samples, 1 + 2 * count, stats_of)
        return found

    def _measure(self, samples: Sequence[Sample], temperature: float) -> list[list[float]]:
        def stats_of(batch: MicroBatch) -> Tensor:
            return self._tokens(batch, temperature).logprobs[:, None]

        return [own.flatten().tolist() for own in self._compute(samples, 1, stats_of)]

    def _compute(self, samples: Sequence[Sample], width: int, stats_of: Callable[[MicroBatch], Tensor]) -> list[Tensor]:
        """Return statistics [n, width] of each sample's tokens."""
        columns = self._passes.compute(samples, [str(i) for i in range(width)], stats_of)
        flat = torch.stack([*columns.values()], dim=-1)
        return list(flat.split([sample.response_length for sample in samples]))


def _to_sample(tokens: list[int]) -> Sample:
    token_ids = torch.tensor(tokens)
    positions = torch.arange(len(tokens))
    return Sample(token_ids, positions >= 1, positions[None], group_id=0, reward=0.0)


def _by_prompt(
    prompts: Sequence[PromptLike], responses: "Sequence[Tokens]", starts: Sequence[int]
) -> Iterator[list[Sample]]:
    for _, group in groupby(zip(prompts, responses, starts, strict=True), key=lambda one: id(one[0])):
        yield [to_read(*one) for one in group]


def open_frozen(
    path: str,
    key: str,
    config: RunConfig,
    hardware: Hardware,
    policy: ModelFiles,
    batching: Batching,
    *,
    trust_remote_code: bool,
) -> FrozenReading:
    """Load the model of the setting `key`, in the policy's computing precision.

    Raises:
        ModelError: it cannot be loaded, or its tokens or media differ from the policy's.
    """
    actor, trusted = config.worker.actor, trust_remote_code
    found = models.load_config(path, trust_remote_code=trusted, key=key)
    vision_language = is_vision_language(found)
    if (vision_language or policy.vision_language) and found.model_type != policy.config.model_type:
        raise models.ModelError(
            f"{key}={path}: its family is {found.model_type}, the policy's {policy.config.model_type}; it is given the "
            "policy's pictures and positions, so name a model of the same family"
        )
    require_same_tokens(path, key, policy, vision_language=vision_language, trust_remote_code=trusted)
    computing = hardware.computing_dtype(actor.kept_dtype, actor.fsdp.mp_param_dtype)
    model = models.load_model(path, config=found, dtype=computing, device=hardware.device, trust_remote_code=trusted)
    longest = config.data.max_prompt_length + config.data.max_response_length
    together = models.find_rope_fault(path, found.get_text_config(), longest) is None
    reading = FrozenReading(model, replace(batching, single=batching.single or not together), hardware.device)
    if not vision_language:  # whose positions come with its pictures
        texts = [policy.tokenizer.encode(text, add_special_tokens=False)[:64] for text in PROBES]
        try:
            reading.require_right(texts, computing)
        except ValueError as error:
            raise models.ModelError(f"{key}={path}: {error}") from error
    return reading


def require_same_tokens(
    path: str, key: str, policy: ModelFiles, *, vision_language: bool, trust_remote_code: bool
) -> None:
    tokenizer, _ = models.load_tokenizer(
        path, vision_language=vision_language, trust_remote_code=trust_remote_code, key=key
    )
    if problem := find_difference(policy.tokenizer, tokenizer):
        raise models.ModelError(
            f"{key}={path}: {problem}; it is given the policy's tokens, so name a model with the same tokenizer"
        )
