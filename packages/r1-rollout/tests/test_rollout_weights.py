"""All weights arrive or an error names which did not."""

import pytest
import torch
from torch import nn

from r1_rollout.errors import WeightsError
from r1_rollout.vllm.sync import send
from r1_rollout.weights import WeightStore, buckets, load_weights


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


def test_a_state_dict_does_as_well_as_its_items():
    model, other = Tied(), Tied()
    load_weights(model, other.state_dict())
    assert torch.equal(model.body.weight, other.body.weight)


class Sharded(torch.Tensor):
    """Looks like a DTensor."""

    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (None, r"\(name, tensor\) pairs, got a NoneType: give model\.state_dict\(\)\.items\(\)"),
        ("model.safetensors", "got a str"),
        (Tied(), "got a Tied"),
        (["body.bias"], "pairs, got 'body.bias'"),
        ([("body.bias", [0.0, 0.0, 0.0])], "pairs, got .*0.0"),
        (
            [("body.bias", torch.zeros(3).as_subclass(Sharded))],
            r"body\.bias is sharded .*full_tensor\(\), on all ranks",
        ),
        ([("body.bias", torch.zeros(3, device="meta"))], r"body\.bias is on the meta device"),
        ([("body.bias", torch.zeros(3, dtype=torch.int8))], r"body\.bias: got torch\.int8, .* unquantised"),
        ([("body.bias", torch.zeros(3, dtype=torch.complex64))], r"body\.bias: got torch\.complex64"),
    ],
)
def test_what_is_no_named_tensor_with_values_is_named(weights, message):
    with pytest.raises(WeightsError, match=message):
        load_weights(Tied(), weights)


def test_an_engine_goes_forward_only():
    model = Tied()
    store = WeightStore(model)
    store.load(weights_of(model), 5)
    store.load(weights_of(model), 5)
    before = model.body.weight.clone()
    with pytest.raises(WeightsError, match=r"version 4 are older than version 5, which the engine has"):
        store.load(weights_of(model), 4)
    assert torch.equal(model.body.weight, before)
    assert store.version == 5
    with pytest.raises(WeightsError):
        store.load([], 6)  # leaves a mixture, which older weights do not mend
    with pytest.raises(WeightsError, match=r"version 4 are older than version 5, which the engine has had"):
        store.load(weights_of(model), 4)
    store.load(weights_of(model), 5)


def test_a_load_that_failed_leaves_no_version_to_trust():
    model = Tied()
    store = WeightStore(model)
    store.load(weights_of(model), 5)
    with pytest.raises(WeightsError, match="not given"):
        store.load(weights_of(model, "body.bias"), 6)
    assert store.version is None


def test_buckets_hold_all_tensors_in_order_and_no_more_bytes_than_asked():
    given = [(str(i), torch.full((i % 7 + 1,), float(i))) for i in range(40)]
    sizes, names = [], []
    for bucket in buckets(given, max_bytes=40):
        sizes.append(sum(tensor.nbytes for _, tensor in bucket))
        for name, tensor in bucket:
            names.append(name)
            assert torch.equal(tensor, dict(given)[name])
    assert names == [name for name, _ in given]
    assert max(sizes) <= 40
    assert len(sizes) < 40


def test_a_tensor_larger_than_a_bucket_goes_alone():
    given = [("a", torch.zeros(2)), ("b", torch.zeros(100)), ("c", torch.zeros(2))]
    assert [[name for name, _ in bucket] for bucket in buckets(given, max_bytes=16)] == [["a"], ["b"], ["c"]]


def test_buckets_cast_floating_point_from_their_masters_and_leave_the_rest():
    given = [("w", torch.randn(4)), ("steps", torch.arange(3))]
    (bucket,) = ([*bucket] for bucket in buckets(given, max_bytes=1000, dtype=torch.bfloat16))
    assert [(name, tensor.dtype) for name, tensor in bucket] == [("w", torch.bfloat16), ("steps", torch.int64)]
    assert torch.equal(bucket[0][1], given[0][1].bfloat16())


def test_the_bound_counts_bytes_after_the_cast():
    given = [(str(i), torch.randn(4)) for i in range(4)]
    assert [len(bucket) for bucket in buckets(given, max_bytes=16, dtype=torch.bfloat16)] == [2, 2]


def test_a_bucket_must_have_room():
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        next(buckets([], max_bytes=0))


def test_a_transfer_that_is_refused_in_its_middle_does_not_stay_open(text_model):
    calls = []

    class Refusing:
        def init_weight_transfer_engine(self, init):
            calls.append("init")

        def start_weight_update(self):
            calls.append("start")

        def update_weights(self, update):
            raise ValueError("there is no module named nonsense")

        def finish_weight_update(self):
            calls.append("finish")

    with pytest.raises(ValueError, match="nonsense"):
        send(Refusing(), text_model.state_dict().items(), torch.float32)
    assert calls == ["init", "start", "finish"]
