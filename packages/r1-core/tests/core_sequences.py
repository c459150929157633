"""A model whose tokens look at one another, without transformers, and cases in which ranks share its rows."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from core_toy import samples
from torch import Tensor, nn
from torch.nn import functional as F

from r1_core.learner import Learner
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.microbatch import collate
from r1_core.learner.optim import build_optimizer
from r1_core.learner.pack import Pack
from r1_core.learner.parallel import Parallel, find_blocks, shard_model
from r1_core.losses import GSPO
from r1_core.objective import Objective

HEADS, KEY_HEADS, SIZE = 4, 1, 2
OBJECTIVES = {"token-wise": Objective(), "whole sequences": Objective(GSPO(), "seq", entropy_coef=0.1)}


class Layer(nn.Module):
    """Attention as a Hugging Face layer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, HEADS * SIZE)
        self.key, self.value = nn.Linear(6, KEY_HEADS * SIZE), nn.Linear(6, KEY_HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, 6)

    def forward(self, hidden: Tensor, pack: Pack) -> Tensor:
        query, key, value = (
            linear(hidden).unflatten(-1, (-1, SIZE)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        if pack.sequence is not None:
            key, value = (pack.sequence.repeat_heads(tensor) for tensor in (key, value))
            query, key, value = (pack.sequence.gather_tokens(tensor) for tensor in (query, key, value))
        pieces = zip(*(tensor.split(pack.lengths, dim=2) for tensor in (query, key, value)), strict=True)
        found = [F.scaled_dot_product_attention(*piece, is_causal=True, enable_gqa=True) for piece in pieces]
        own = torch.cat(found, dim=2).transpose(1, 2)
        if pack.sequence is not None:
            own = pack.sequence.gather_heads(own)
        return hidden + self.out(own.flatten(2))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, *, input_ids: Tensor, position_ids: Tensor, pack: Pack) -> Tensor:
        hidden = self.embedding(input_ids) + position_ids[..., None] / 10
        for layer in self.layers:
            hidden = layer(hidden, pack)
        return hidden


class Attending(nn.Module):
    """Predicts a token from all before it."""

    _no_split_modules = ("Layer",)
    reads_pack = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.decoder, self.head = Decoder(), nn.Linear(6, 11, bias=False)

    def get_decoder(self) -> nn.Module:
        return self.decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, *, use_cache: bool, **row: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.decoder(**row)))


def build(parallel: Parallel | None = None, *, padding_free: bool = True) -> Learner:
    model = Attending().double()
    if parallel is not None:
        assert parallel.mesh is not None
        shard_model(model, find_blocks(model), parallel.mesh)
    optimizer = build_optimizer(model.named_parameters(), lr=1e-2)
    batching = Batching(padding_free, MicroLimit(1), MicroLimit(3))
    return Learner(model, optimizer, lambda step: 1.0, batching=batching, max_grad_norm=0.1, parallel=parallel)


Course = tuple[list[dict[str, float]], dict[str, Tensor], list[list[float]]]


def learn(objective: str, sequence_size: int | None = None) -> Course:
    """Metrics of three steps, the weights after them, and log-probs; of one process without a `sequence_size`."""
    learner = build(None if sequence_size is None else Parallel.join("cpu", sequence_size=sequence_size))
    metrics = [learner.forward_backward(samples(), OBJECTIVES[objective]) | learner.optim_step() for _ in range(3)]
    weights = {name: tensor.clone() for name, tensor in learner.weights()}
    assert not learner.model.get_decoder()._forward_pre_hooks, "an engine that shares the model would find a hook"
    return metrics, weights, learner.compute_logprobs_together(samples(), padding_free=True)


def refusals() -> list[str]:
    """What is said to padded rows, and to sizes that do not fit."""
    parallel = Parallel.join("cpu", sequence_size=2)
    said = []
    blind = build(parallel)
    blind.model.reads_pack = False
    for refused in (
        lambda: build(parallel).set_layout("padded"),
        lambda: blind.add_logprobs(samples()),
        lambda: build(parallel, padding_free=False).add_logprobs(samples()),
        lambda: Parallel.join("cpu", sequence_size=3),
    ):
        with pytest.raises(ValueError, match=r"share") as error:
            refused()
        said.append(str(error.value))
    return said


def parts() -> list[tuple[int, int, int]]:
    """Of rows of 4, 1 and 3 tokens: how long this rank's part is, what it predicts, and how many tokens are trained."""
    parallel, found = Parallel.join("cpu", sequence_size=2), []
    four, *_ = samples()
    for length in (4, 1, 3):
        cut = {name: getattr(four, name)[..., :length] for name in ("token_ids", "loss_mask", "position_ids")}
        batch = collate([type(four)(**cut, group_id=0, reward=0.0)], padding_free=True, sequence=parallel.sequence)
        assert parallel.sequence is not None
        assert batch.pack is not None
        own = parallel.sequence.part(batch.forward["input_ids"], 1)
        assert sum(batch.pack.lengths) == batch.forward["position_ids"].shape[1]
        found.append((own.shape[1], len(batch.targets), int(batch.loss_mask.sum())))
    return found


def step_and_save(folder: Path, sequence_size: int | None = None) -> None:
    """A step of the first weights, saved."""
    learner = build(None if sequence_size is None else Parallel.join("cpu", sequence_size=sequence_size))
    learner.forward_backward(samples(), Objective())
    learner.optim_step()
    learner.save(folder)


def load_and_step(folder: Path, sequence_size: int | None = None) -> dict[str, Tensor]:
    """The weights a step after those that were saved."""
    learner = build(None if sequence_size is None else Parallel.join("cpu", sequence_size=sequence_size))
    learner.load(folder)
    learner.forward_backward(samples(), Objective())
    learner.optim_step()
    return {name: tensor.clone() for name, tensor in learner.weights()}
