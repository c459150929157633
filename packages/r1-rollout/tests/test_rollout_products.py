"""Products of a few queries with keys and values: both ways to compute them, and when which is taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from r1_rollout.embedded import products
from r1_rollout.embedded.products import score_keys, sum_values

PLACES, HEADS, SIZE, ALL = 40, 2, 8, 72


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The embeddings of each sum."""
    counts: list[int] = []
    right = torch.embedding_bag

    def counted(table: Tensor, index: Tensor, *rest: Any) -> Any:
        counts.append(len(index))
        return right(table, index, *rest)

    monkeypatch.setattr(torch, "embedding_bag", counted)
    return counts


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["listed each time", "listed once"])
@pytest.mark.parametrize("columns", [slice(0, ALL), slice(0, 57), slice(9, 70)], ids=str)
def test_sums_of_embeddings_are_products(
    columns: slice, kept: int, sums: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_KEPT", kept)
    query, keys = draw(PLACES, HEADS, 3, SIZE), draw(PLACES + 3, HEADS, SIZE, ALL)[:PLACES]
    scores = score_keys(query, keys, columns)
    torch.testing.assert_close(scores, query @ keys[..., columns])
    values = draw(PLACES + 3, HEADS, ALL, SIZE)[:PLACES]
    weights = scores.softmax(-1)
    torch.testing.assert_close(sum_values(weights, values, columns), weights @ values[:, :, columns])
    assert sums == [query.numel(), weights.numel()]


CASES: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "many queries": lambda few, many: (few.repeat(1, 1, 3, 1), many),
    "few places": lambda few, many: (few[:3], many[:3]),
    "another precision": lambda few, many: (few.double(), many.double()),
    "another layout": lambda few, many: (few, many.transpose(2, 3).contiguous().transpose(2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_other_products_are_those_of_matrices(name: str, sums: list[int]) -> None:
    query, keys = CASES[name](draw(PLACES, HEADS, 3, SIZE), draw(PLACES, HEADS, SIZE, ALL))
    torch.testing.assert_close(score_keys(query, keys, slice(0, 60)), query @ keys[..., :60])
    weights, values = CASES[name](draw(PLACES, HEADS, 3, 60), draw(PLACES, HEADS, ALL, SIZE))
    torch.testing.assert_close(sum_values(weights, values, slice(0, 60)), weights @ values[:, :, :60])
    assert not sums


def test_few_columns_of_keys_are_not_read_whole(sums: list[int]) -> None:
    query, keys = draw(20 * PLACES, HEADS, 3, SIZE), draw(20 * PLACES, HEADS, SIZE, ALL)
    score_keys(query, keys, slice(0, 35))
    assert not sums
    score_keys(query, keys, slice(0, 36))
    assert sums == [query.numel()]
