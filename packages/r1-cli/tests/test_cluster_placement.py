"""Where ranks are placed, and what is said where they do not fit."""

import pytest

from r1_cli.cluster.placement import Node, require_room, seat_ranks, share_threads
from r1_cli.config import ConfigError


def test_ranks_are_ordered_by_address_and_device_whatever_order_the_nodes_come_in():
    nodes = [Node("c", "10.0.0.10", ("0", "1")), Node("a", "10.0.0.9", ("4", "5")), Node("b", "head", ("0", "1"))]
    for order in (nodes, nodes[::-1]):
        seats = seat_ranks(order)
        assert [(seat.rank, seat.node.id, seat.device) for seat in seats] == [
            (0, "b", "0"), (1, "b", "1"), (2, "a", "4"), (3, "a", "5"), (4, "c", "0"), (5, "c", "1"),
        ]  # fmt: skip
    assert seats[3].name == "learner-3"


def test_two_nodes_of_one_address_keep_their_order():
    nodes = [Node("y", "127.0.0.1", ("cpu",)), Node("x", "127.0.0.1", ("cpu",))]
    assert [seat.node.id for seat in seat_ranks(nodes)] == ["x", "y"]


@pytest.mark.parametrize(("processors", "ranks", "each"), [(64, 8, 8), (2, 2, 1), (1, 4, 1), (7, 2, 3), (5, 1, 5)])
def test_ranks_share_the_threads_and_each_has_one(processors, ranks, each):
    assert share_threads(processors, ranks) == each


@pytest.mark.parametrize(
    ("offers", "nnodes", "per_node"),
    [([("a", 8)], 1, 8), ([("a", 8), ("b", 4), ("c", 8)], 2, 8), ([("a", 1), ("a", 1)], 2, 1)],
)
def test_what_fits_is_accepted(offers, nnodes, per_node):
    require_room(offers, nnodes, per_node, "GPUs")


@pytest.mark.parametrize(
    ("offers", "nnodes", "per_node", "says"),
    [
        (
            [("10.0.0.1", 8), ("10.0.0.2", 4)], 2, 8,
            ["trainer.n_gpus_per_node=8", "16 GPUs", "has 12", "10.0.0.1 8, 10.0.0.2 4", "10.0.0.2 has fewer", "4"],
        ),
        ([("10.0.0.1", 8)], 2, 8, ["trainer.nnodes=2", "16 GPUs", "has 8", "there are 1 nodes", "at most 1"]),
        ([("127.0.0.1", 2)], 1, 8, ["trainer.n_gpus_per_node=8", "has 2", "at most 2"]),
        ([("127.0.0.1", 0)], 1, 8, ["has 0", "no GPUs to train on"]),
        ([], 2, 1, ["trainer.nnodes=2", "by node: none"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_by_node_with_what_to_set(offers, nnodes, per_node, says):
    with pytest.raises(ConfigError) as error:
        require_room(offers, nnodes, per_node, "GPUs")
    for part in says:
        assert part in str(error.value)
