"""From logits to tokens: the distribution to sample from, the log-prob to report, and each sample's own noise."""

from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from r1_rollout.types import SamplingParams

_BITS = 24  # what float32 holds exactly


def noise_key(seed: int, prompt_id: str, sample: int) -> bytes:
    """Name one sample's noise: the same on every machine, whatever else is in the batch."""
    return blake2b(f"{seed}\0{sample}\0{prompt_id}".encode(), digest_size=32).digest()


def uniform(key: bytes, step: int) -> float:
    """Return the noise of token number `step`, in [0, 1): a counter-based generator, so nothing is stored."""
    word = blake2b(step.to_bytes(8, "little"), key=key, digest_size=8).digest()
    return (int.from_bytes(word, "little") >> (64 - _BITS)) / (1 << _BITS)


def allowed_tokens(vocabulary: int, banned: Collection[int]) -> Tensor:
    """Return the token ids that may be sampled.

    Returns:
        int64 [vocabulary less the banned], ascending.

    Raises:
        ValueError: every token is banned.
    """
    banned = frozenset(banned)
    allowed = [token for token in range(vocabulary) if token not in banned]
    if not allowed:
        raise ValueError(f"all {vocabulary} tokens of the vocabulary are banned: nothing is left to sample")
    return torch.tensor(allowed)


def choose_tokens(
    logits: Tensor, allowed: Tensor, noise: Sequence[float], params: SamplingParams
) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution at the row's noise.

    Tokens outside `allowed` are taken away before anything else, so they cannot be returned. Top-k and nucleus
    sampling (arXiv 1904.09751, eq. 2) then cut what is left. The reported log-prob knows of neither: it is the plain
    log-softmax at the sampling temperature over the whole vocabulary, which is what a learner computes. Greedy
    sampling reports it at temperature 1.

    Args:
        logits: [rows, vocabulary], any float type.
        allowed: int64 [choices], see `allowed_tokens`.
        noise: one number in [0, 1) per row; unused if greedy.

    Returns:
        int64 [rows] tokens and float32 [rows] log-probs.
    """
    plain = (logits.float() / (params.temperature or 1.0)).log_softmax(dim=-1)
    choices = plain.index_select(1, allowed)
    if params.temperature == 0:
        picked = choices.argmax(dim=-1, keepdim=True)
    else:
        picked = _invert(choices, torch.tensor(noise, dtype=torch.float32, device=logits.device), params)
    tokens = allowed[picked]
    return tokens[:, 0], plain.gather(1, tokens)[:, 0]


def _invert(choices: Tensor, noise: Tensor, params: SamplingParams) -> Tensor:
    """Return int64 [rows, 1], the index of the sampled choice, from log-probs [rows, choices] and noise [rows]."""
    order = None
    if params.top_k != -1:
        choices, order = choices.topk(min(params.top_k, choices.shape[1]))
    elif params.top_p < 1:
        choices, order = choices.sort(dim=-1, descending=True, stable=True)
    probs = choices.softmax(dim=-1)
    cumulative = probs.cumsum(dim=-1)
    if params.top_p < 1:
        cumulative = probs.masked_fill(cumulative - probs >= params.top_p * cumulative[:, -1:], 0.0).cumsum(dim=-1)
    target = noise[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, target, right=True).clamp_(max=choices.shape[1] - 1)
    return picked if order is None else order.gather(1, picked)
