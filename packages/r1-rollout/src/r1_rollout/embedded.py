"""The embedded engine: group sampling inside the process, on any CPU or GPU, with no server."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from r1_rollout.decoding import Decoding
from r1_rollout.kv import ATTENTION
from r1_rollout.sampling import allowed_tokens
from r1_rollout.types import Completion, PromptLike, SamplingParams
from r1_rollout.weights import Weights, WeightStore


class EmbeddedEngine:
    """A `Generator` over a Hugging Face causal or vision-language model.

    A prompt is computed once and shared by its samples; the samples of many prompts decode together, and new groups
    enter as finished ones leave.
    """

    def __init__(
        self,
        model: Any,
        *,
        end_token_ids: Collection[int],
        banned_token_ids: Collection[int] = (),
        max_sequences: int = 256,
        device: torch.device | str = "cpu",
    ) -> None:
        """Take over `model`.

        Args:
            model: a `transformers.PreTrainedModel` with full attention in every layer. The engine owns it, with its
                configuration (do not share that object): moves it, sets its attention, overwrites its weights.
            end_token_ids: tokens that end an answer.
            banned_token_ids: tokens that are never sampled, such as the placeholders of pictures.
            max_sequences: samples that decode at the same time; with the lengths it bounds the memory.

        Raises:
            ValueError: the model has layers without full attention, an end token is banned, or nothing is allowed.
        """
        text = model.config.get_text_config()
        if kinds := set(getattr(text, "layer_types", None) or ()) - {"full_attention"}:
            raise ValueError(f"{type(model).__name__}: the embedded engine has no {', '.join(sorted(kinds))} layers")
        if both := sorted({*end_token_ids} & {*banned_token_ids}):
            raise ValueError(f"tokens {both} are both end tokens and banned: answers could not end")
        model.set_attn_implementation(ATTENTION)
        self._model = model.to(device).eval().requires_grad_(False)
        self._allowed = allowed_tokens(text.vocab_size, banned_token_ids).to(device)
        self._end_token_ids = frozenset(end_token_ids)
        self._max_sequences = max_sequences
        self._weights = WeightStore(model)
        self._version: int | None = None  # while awake
        self._decoding: Decoding | None = None

    @contextmanager
    def awake(self, weights: Weights, version: int) -> Iterator[None]:
        """Load `weights`, sample inside the block; at its end the cache is freed and unfinished calls are over.

        Raises:
            RuntimeError: the engine is awake already.
            WeightsError: the weights are not those of the engine's model, or older than those it has.
        """
        if self._version is not None:
            raise RuntimeError(f"the engine is awake already, with weight version {self._version}")
        self._weights.load(weights, version)
        self._version = version
        try:
            yield
        finally:
            self._version = None
            self._close()
            if self._allowed.is_cuda:
                torch.cuda.empty_cache()

    def generate(self, prompts: Sequence[PromptLike], params: SamplingParams) -> Iterator[tuple[int, list[Completion]]]:
        """Yield (index into `prompts`, its `params.n` completions) as each group finishes.

        A later call ends an earlier one. Answer token t of a prompt of length P stands at position P + t; on the
        rotary axes of M-RoPE (arXiv 2409.12191, section 2.1) at the prompt's largest position + 1 + t.

        Raises:
            RuntimeError: outside an awake block, or continued after the call was ended.
            ValueError: a prompt is empty, its positions do not fit the others', or a group exceeds `max_sequences`.
            FloatingPointError: the model's logits are not finite.
        """
        if self._version is None:
            raise RuntimeError("generate() needs an awake engine: call it inside `with engine.awake(weights, version)`")
        if params.n > self._max_sequences:
            raise ValueError(f"n={params.n} samples a prompt, but max_sequences={self._max_sequences}: raise it")
        _check(prompts)
        self._close()
        self._decoding = Decoding(
            self._model,
            prompts,
            params,
            allowed=self._allowed,
            end_token_ids=self._end_token_ids,
            max_sequences=self._max_sequences,
            version=self._version,
        )
        return _groups(self._decoding)

    @torch.inference_mode()
    def score(
        self, prompts: Sequence[PromptLike], responses: Sequence[Sequence[int]], temperature: float = 1.0
    ) -> list[list[float]]:
        """Return the log-prob of each token of each prompt's response under the present weights.

        Raises:
            RuntimeError: outside an awake block.
        """
        if self._version is None:
            raise RuntimeError("score() needs an awake engine: call it inside `with engine.awake(weights, version)`")
        _check(prompts)
        device = self._allowed.device
        scores = []
        for prompt, response in zip(prompts, responses, strict=True):
            start, length = len(prompt.token_ids), len(response)
            rotary = prompt.position_ids[1:] if len(prompt.position_ids) > 1 else prompt.position_ids
            answer = int(rotary.max()) + 1 + torch.arange(length).expand(len(rotary), -1)
            positions = torch.cat([rotary, answer], dim=1)[:, None]
            logits = self._model(
                input_ids=torch.tensor([[*prompt.token_ids, *response]], device=device),
                position_ids=(positions[0] if len(positions) == 1 else positions).to(device),
                use_cache=False,
                **{name: value.to(device) for name, value in prompt.model_inputs.items()},
            ).logits[0, start - 1 : start - 1 + length]
            logprobs = (logits.float() / temperature).log_softmax(dim=-1)
            scores.append(logprobs.gather(1, torch.tensor(response, device=device)[:, None])[:, 0].tolist())
        return scores

    def _close(self) -> None:
        if self._decoding is not None:
            self._decoding.close()
            self._decoding = None


def _groups(decoding: Decoding) -> Iterator[tuple[int, list[Completion]]]:
    try:
        while decoding.unfinished:
            yield from decoding.advance()
    finally:
        decoding.close()


def _check(prompts: Sequence[PromptLike]) -> None:
    """Raise ValueError on a prompt that the model would misread or choke on far from its cause."""
    for prompt in prompts:
        if not prompt.token_ids:
            raise ValueError(f"prompt {prompt.id} is empty: the model needs at least one token to go on from")
        axes = len(prompts[0].position_ids)
        expected = (axes, len(prompt.token_ids))
        if tuple(prompt.position_ids.shape) != expected:
            raise ValueError(
                f"prompt {prompt.id}: position_ids have shape {list(prompt.position_ids.shape)}, expected "
                f"{list(expected)}: {axes} axes like the first prompt, one column per token"
            )
