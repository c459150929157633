"""Products of a few queries with each sequence's own keys and values.

On processors they are sums of embeddings, whose kernel (FBGEMM) reads memory at its speed. Torch's batched matrix
product takes two to three times as long where each of many matrices meets few rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

_MANY = 8  # queries of a matrix from which on the batched product is as fast
_FEW = 8192  # queries × columns below which it is, because listing the embeddings takes some 20 µs a step
_WHOLE = 0.5  # share of the keys' columns in use below which it is, because embeddings are read whole
_KEPT = 1 << 20  # embeddings of a list that the layers of a step share; listing more takes a tenth of their sum
_HAS_KERNEL = "fbgemm" in torch.backends.quantized.supported_engines


def score_keys(query: Tensor, keys: Tensor, columns: slice) -> Tensor:
    """Multiply queries [batch, heads, queries, size] by some columns of keys [batch, heads, size, all columns].

    Returns:
        [batch, heads, queries, columns].
    """
    count = columns.stop - columns.start
    if count >= _WHOLE * keys.shape[3] and _fits(query, keys, count):
        return _sum_rows(query, keys, slice(0, keys.shape[2]))[..., columns]
    return _multiply(query, keys[..., columns])


def sum_values(weights: Tensor, values: Tensor, columns: slice) -> Tensor:
    """Sum some columns of values [batch, heads, all columns, size] by weights [batch, heads, queries, columns].

    Returns:
        [batch, heads, queries, size].
    """
    if _fits(weights, values, weights.shape[3]):
        return _sum_rows(weights, values, columns)
    return _multiply(weights, values[:, :, columns])


def _fits(left: Tensor, right: Tensor, columns: int) -> bool:
    known = right.is_cpu and right.dtype == torch.float32 and right.is_contiguous() and _HAS_KERNEL
    few, size = left.shape[2] < _MANY, left.shape[:3].numel() * columns
    return known and few and size >= _FEW and right.shape[:3].numel() < 2**31


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, in fewer calls."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:3], right.shape[3])


def _sum_rows(weights: Tensor, tensor: Tensor, rows: slice) -> Tensor:
    """Return weights @ tensor[:, :, rows]: each row of `weights` says how to sum the rows of its matrix."""
    batch, heads, queries, _ = weights.shape
    listing = _list_embeddings if weights.numel() > _KEPT else _recent_embeddings
    index, begins = listing(batch * heads, queries, tensor.shape[2], rows.start, rows.stop)
    sums = torch.embedding_bag(tensor.flatten(0, 2), index, begins, False, 0, False, weights.reshape(-1))[0]
    return sums.view(batch, heads, queries, -1)


def _list_embeddings(matrices: int, queries: int, height: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """List the rows that each query sums, of matrices of so many rows, and where each list begins, as int32."""
    rows = torch.arange(matrices, dtype=torch.int32)[:, None, None] * height
    index = (rows + torch.arange(first, last, dtype=torch.int32)).expand(matrices, queries, -1).reshape(-1)
    return index, torch.arange(0, len(index), last - first, dtype=torch.int32)


_recent_embeddings = lru_cache(maxsize=16)(_list_embeddings)
