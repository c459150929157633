"""From logits to tokens: the sampling distribution, the reported log-prob, and each sample's own noise."""

from collections.abc import Collection
from hashlib import blake2b

import torch
from torch import Tensor
from torch.nn.functional import pad

from r1_rollout.types import SamplingParams

_BITS = 24  # what float32 holds exactly
# Factors of SplitMix64, as signed 64-bit words.
_WEYL, _FIRST, _SECOND = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_BLOCK = 128  # columns that are summed before one is sought among them
_NUCLEUS = 512  # likeliest tokens among which a nucleus is sought before all are sorted
SEED_BITS = 62  # what fits signed and unsigned words everywhere, with room for the samples of a group


def noise_key(seed: int, prompt_id: str, sample: int) -> int:
    """Return the signed 64-bit seed of a sample's noise: the same on every machine and in any batch."""
    word = blake2b(f"{seed}\0{sample}\0{prompt_id}".encode(errors="surrogatepass"), digest_size=8)
    return int.from_bytes(word.digest(), "little", signed=True)


def sample_seed(seed: int, prompt_id: str, sample: int) -> int:
    """Return the seed of one sample for vLLM in [0, 2^62 + sample], a function of (seed, prompt id, sample index).

    A server takes one seed a request and gives sample i that seed + i, so that is the rule everywhere.
    """
    return (noise_key(seed, prompt_id, 0) & ((1 << SEED_BITS) - 1)) + sample


def uniform(keys: Tensor, steps: Tensor) -> Tensor:
    """Return the noise of token number `steps` of samples, by SplitMix64 (Steele et al., OOPSLA 2014).

    Integer arithmetic modulo 2^64 is the same on every device.

    Args:
        keys: int64 [rows], see `noise_key`.
        steps: int64 [rows], from 0.

    Returns:
        float32 [rows] in [0, 1).
    """
    word = keys + (steps + 1) * _WEYL
    word = (word ^ _shift(word, 30)) * _FIRST
    word = (word ^ _shift(word, 27)) * _SECOND
    return _shift(word ^ _shift(word, 31), 64 - _BITS).float() / (1 << _BITS)


def _shift(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def banned_tokens(vocabulary: int, banned: Collection[int]) -> Tensor:
    """Return the banned token ids, int64 [banned tokens], ascending. Raises ValueError if every token is banned."""
    inside = sorted({token for token in banned if 0 <= token < vocabulary})
    if len(inside) == vocabulary:
        raise ValueError(f"all {vocabulary} tokens of the vocabulary are banned: nothing is left to sample")
    return torch.tensor(inside, dtype=torch.int64)


def choose_tokens(
    logits: Tensor, banned: Tensor, noise: Tensor, params: SamplingParams, *, fixed_shapes: bool = False
) -> tuple[Tensor, Tensor]:
    """Sample one token a row by inverting the cumulative distribution at the row's noise.

    Banned tokens are removed first. Then min-p (arXiv 2407.01082), top-k and nucleus sampling (arXiv 1904.09751) apply,
    in this order. The reported log-prob ignores all of them: it is the plain log-softmax at the sampling temperature
    over the whole vocabulary, as a learner computes it. Greedy sampling reports it at temperature 1.

    Args:
        logits: [rows, vocabulary], any float type.
        banned: int64 [banned tokens], see `banned_tokens`.
        noise: float32 [rows] in [0, 1); unused if greedy.
        fixed_shapes: let no shape depend on numbers, so that the host waits for none and a CUDA graph can be captured.
            The tokens are the same, but a large vocabulary is then sorted for every row if `top_p` is set alone.

    Returns:
        int64 [rows] tokens and float32 [rows] log-probs; -inf or NaN where the logits leave nothing to sample.
    """
    logprobs = tempered(logits, params.temperature).log_softmax(dim=-1)
    allowed = logprobs.index_fill(1, banned, -torch.inf) if len(banned) else logprobs
    if params.temperature == 0:
        tokens = allowed.argmax(dim=-1, keepdim=True)
    else:
        tokens = _invert(allowed.softmax(dim=-1), noise, params, fixed_shapes)
    return tokens[:, 0], allowed.gather(1, tokens)[:, 0]


def tempered(logits: Tensor, temperature: float) -> Tensor:
    """Return float32 logits divided by the temperature, by 1 if it is 0."""
    return logits.float() if temperature in (0, 1) else logits.float() / temperature


def _invert(probs: Tensor, noise: Tensor, params: SamplingParams, fixed_shapes: bool) -> Tensor:
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), 0.0)
    if params.top_k != -1:
        probs, order = probs.topk(min(params.top_k, probs.shape[1]))
        return order.gather(1, _pick(_nucleus(probs, params.top_p), noise))
    if params.top_p == 1:
        return _pick(probs, noise)
    mass = probs.sum(dim=-1, keepdim=True)
    likeliest, order = probs.topk(min(_NUCLEUS, probs.shape[1]))
    tokens = order.gather(1, _pick(_nucleus(likeliest, params.top_p, mass), noise))
    if order.shape[1] == probs.shape[1]:
        return tokens
    # A row by itself says whether it must be sorted, so that its token does not depend on the other rows.
    wide = likeliest.sum(dim=-1) < params.top_p * mass[:, 0]
    if fixed_shapes:
        return torch.where(wide[:, None], _pick_sorted(probs, noise, params.top_p), tokens)
    rows = wide.nonzero()[:, 0]
    if len(rows):
        tokens[rows] = _pick_sorted(probs[rows], noise[rows], params.top_p)
    return tokens


def _pick_sorted(probs: Tensor, noise: Tensor, top_p: float) -> Tensor:
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    return order.gather(1, _pick(_nucleus(ordered, top_p), noise))


def _nucleus(probs: Tensor, top_p: float, mass: Tensor | None = None) -> Tensor:
    """Zero the probabilities [rows, choices], descending, after the first that reach `top_p` of the mass [rows, 1]."""
    if top_p == 1:
        return probs
    cumulative = probs.cumsum(dim=-1)
    return probs.masked_fill(cumulative - probs >= top_p * (cumulative[:, -1:] if mass is None else mass), 0.0)


def _pick(probs: Tensor, noise: Tensor) -> Tensor:
    """Return int64 [rows, 1]: the first index whose cumulative probability exceeds the noise; none of probability 0.

    By blocks of columns first: a cumulative sum over a large vocabulary takes a CPU seven times as long.
    """
    columns = probs.shape[1]
    if missing := -columns % _BLOCK:
        probs = pad(probs, (0, missing))
    blocks = probs.unflatten(1, (-1, _BLOCK))
    block, rest = _search(blocks.sum(dim=-1), noise[:, None])
    rows = torch.arange(len(probs), device=probs.device)
    index, _ = _search(blocks[rows, block[:, 0]], rest)
    return (block * _BLOCK + index).clamp_(max=columns - 1)


def _search(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Find where the cumulative weights [rows, columns] exceed the noise [rows, 1].

    Returns:
        int64 [rows, 1], the first such column, and float32 [rows, 1] in [0, 1), how far into its weight the noise is.
    """
    cumulative = weights.cumsum(dim=-1)
    target = noise * cumulative[:, -1:]  # below the whole even if rounded, as noise is at most 1 - 2^-24
    index = torch.searchsorted(cumulative, target, right=True).clamp_(max=weights.shape[1] - 1)
    weight = weights.gather(1, index)
    rest = (target - cumulative.gather(1, index) + weight) / weight
    return index, rest.clamp(0, 1 - 2**-_BITS)
