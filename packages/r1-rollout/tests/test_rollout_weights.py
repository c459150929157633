"""All weights arrive or an error names which did not."""

import pytest
import torch
from torch import nn

from r1_rollout.weights import WeightsError, load_weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def weights_of(model: nn.Module, *without: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.randn(tensor.shape)) for name, tensor in model.state_dict().items() if name not in without]


def test_every_tensor_is_copied_in_the_models_precision():
    model = Tied().to(torch.bfloat16)
    given = weights_of(model, "head.weight")
    load_weights(model, given)
    for name, tensor in given:
        assert torch.equal(model.state_dict()[name], tensor.bfloat16())


@pytest.mark.parametrize("absent", ["embed.weight", "head.weight", "nothing"])
def test_tied_weights_may_come_under_either_name_or_both(absent):
    model = Tied()
    given = dict(weights_of(model, absent))
    load_weights(model, given.items())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.embed.weight, given.get("head.weight", given.get("embed.weight")))


def test_missing_weights_are_named():
    model = Tied()
    with pytest.raises(WeightsError, match=r"1 weights .* not given: body\.bias"):
        load_weights(model, weights_of(model, "body.bias"))


def test_unknown_weights_are_named_up_to_five():
    model = Tied()
    unknown = [(f"extra.{i}", torch.zeros(1)) for i in range(7)]
    with pytest.raises(WeightsError, match=r"7 weights are unknown .*: extra\.0, .*extra\.4, …$"):
        load_weights(model, [*weights_of(model), *unknown])


def test_a_shape_that_would_broadcast_is_refused():
    model = Tied()
    given = {**dict(weights_of(model)), "body.bias": torch.zeros(1)}
    with pytest.raises(WeightsError, match=r"body\.bias: got shape \[1\], .* has \[3\]"):
        load_weights(model, given.items())
