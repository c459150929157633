"""Where ranks are placed, and what is said where they do not fit."""

import pytest

from r1_cli.config import ConfigError, load_config
from r1_cli.config.rollout import EnginesConfig
from r1_cli.config.trainer import TrainerConfig
from r1_cli.placement import (
    ClusterNodes,
    Node,
    allocate_devices,
    fit_nodes,
    place_engines,
    place_ranks,
    plan_placement,
    require_devices,
    threads_per_rank,
)


def test_ranks_are_ordered_by_address_and_device_whatever_order_the_nodes_come_in():
    nodes = [Node("c", "10.0.0.10", ("0", "1")), Node("a", "10.0.0.9", ("4", "5")), Node("b", "head", ("0", "1"))]
    for order in (nodes, nodes[::-1]):
        placements = place_ranks(order)
        assert [(placement.rank, placement.node.id, placement.device) for placement in placements] == [
            (0, "b", "0"), (1, "b", "1"), (2, "a", "4"), (3, "a", "5"), (4, "c", "0"), (5, "c", "1"),
        ]  # fmt: skip
    assert placements[3].name == "learner-3"


def test_two_nodes_of_one_address_keep_their_order():
    nodes = [Node("y", "127.0.0.1", ("cpu",)), Node("x", "127.0.0.1", ("cpu",))]
    assert [placement.node.id for placement in place_ranks(nodes)] == ["x", "y"]


@pytest.mark.parametrize(("processors", "ranks", "each"), [(64, 8, 8), (2, 2, 1), (1, 4, 1), (7, 2, 3), (5, 1, 5)])
def test_ranks_share_the_threads_and_each_has_one(processors, ranks, each):
    assert threads_per_rank(processors, ranks) == each


@pytest.mark.parametrize(
    ("offers", "nnodes", "per_node"),
    [([("a", 8)], 1, 8), ([("a", 8), ("b", 4), ("c", 8)], 2, 8), ([("a", 1), ("a", 1)], 2, 1)],
)
def test_what_fits_is_accepted(offers, nnodes, per_node):
    require_devices(offers, nnodes, per_node, "GPUs")


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
        require_devices(offers, nnodes, per_node, "GPUs")
    for part in says:
        assert part in str(error.value)


TWO = (Node("b", "10.0.0.2", ("0", "1", "2", "3")), Node("a", "10.0.0.1", ("0", "1", "2", "3")))


@pytest.mark.parametrize(
    ("machines", "size", "expected"),
    [
        (ClusterNodes(TWO[:1]), 1, [("b", "0"), ("b", "1"), ("b", "2"), ("b", "3")]),
        (ClusterNodes(TWO), 4, [("a", "0", "1", "2", "3"), ("b", "0", "1", "2", "3")]),
        (ClusterNodes(TWO[:1], (Node("b", "10.0.0.2", ("4", "5")),)), 1, [("b", "4"), ("b", "5")]),
        (ClusterNodes(TWO, (Node("c", "10.0.0.3", ("cpu",) * 4),)), 2, [("c", "cpu", "cpu")] * 2),
    ],
)
def test_an_engine_has_its_devices_on_one_node_those_of_ranks_or_others_if_they_are_apart(machines, size, expected):
    placements = place_engines(machines, size)
    assert [(placement.node.id, *placement.devices) for placement in placements] == expected
    assert [placement.name for placement in placements] == [f"engine-{number}" for number in range(len(expected))]


BASE = [
    "data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model",
    "worker.reward.reward_function=math", "worker.rollout.name=vllm",
]  # fmt: skip
APART = ["worker.rollout.engines.nnodes=1", "worker.rollout.engines.n_gpus_per_node=2"]


@pytest.mark.parametrize(
    ("words", "ranks", "engines"),
    [
        (["trainer.n_gpus_per_node=1"], [], []),
        (["trainer.n_gpus_per_node=2"], ["0", "1"], [("node 0", "0", "1")]),
        (["trainer.n_gpus_per_node=2", *APART], ["0", "1"], [("node 0", "2", "3")]),
        (["trainer.n_gpus_per_node=1", *APART], ["0"], [("node 0", "1", "2")]),
        (
            ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "worker.rollout.name=embedded"], ["0", "0"],
            [("node 0", "0"), ("node 1", "0")],
        ),
        (
            ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", *APART], ["0", "0"],
            [("node 0 or a further one", "1", "2")],
        ),
        (["trainer.n_gpus_per_node=2", "worker.rollout.servers.urls=[http://a:8000]"], ["0", "1"], []),
    ],
)  # fmt: skip
def test_seats_are_shown_for_the_numbers_given(words, ranks, engines, monkeypatch):
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")
    placement = plan_placement(load_config([*BASE, *words])[0])
    assert [placement.device for placement in placement.ranks] == ranks
    assert [(placement.node.address, *placement.devices) for placement in placement.engines] == engines


def share(devices, nnodes, per_node, apart):
    named = [(f"10.0.0.{number}", count) for number, count in enumerate(devices)]
    return allocate_devices(named, nnodes, per_node, EnginesConfig(nnodes=apart[0], n_gpus_per_node=apart[1]), "GPUs")


@pytest.mark.parametrize(
    ("devices", "nnodes", "per_node", "apart", "expected"),
    [
        ([8], 1, 4, (1, 4), [(4, 4)]),
        ([8], 1, 8, (0, 0), [(8, 0)]),
        ([4, 8], 1, 4, (1, 8), [(4, 0), (0, 8)]),
        ([8, 4], 1, 8, (1, 4), [(8, 0), (0, 4)]),
        ([2, 4], 2, 1, (1, 2), [(1, 2), (1, 0)]),
        ([8, 8, 2], 2, 8, (1, 2), [(8, 0), (8, 0), (0, 2)]),
        ([4, 4, 2, 2], 2, 2, (2, 4), [(2, 0), (2, 0), (0, 4), (0, 4)]),
        ([6, 5], 2, 4, (2, 1), [(4, 1), (4, 1)]),
    ],
)
def test_engines_apart_are_where_ranks_leave_room_or_on_further_machines(devices, nnodes, per_node, apart, expected):
    assert share(devices, nnodes, per_node, apart) == expected


@pytest.mark.parametrize(
    ("devices", "nnodes", "per_node", "apart"),
    [
        ([8], 1, 8, (1, 1)),
        ([8, 4], 1, 4, (2, 8)),
        ([8, 8], 2, 8, (1, 2)),
        ([4, 4], 1, 4, (2, 4)),
        ([6, 4], 2, 4, (2, 1)),
    ],
)
def test_engines_apart_that_do_not_fit_are_told_by_node_with_what_to_set(devices, nnodes, per_node, apart):
    with pytest.raises(ConfigError) as error:
        share(devices, nnodes, per_node, apart)
    for part in (f"worker.rollout.engines.n_gpus_per_node={apart[1]}", f"10.0.0.0 {devices[0]}", "engines are on the"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("min_nodes", "apart", "nodes", "found"),
    [
        (None, (0, 0), [4, 4, 4], [(2, 0), (2, 0)]),
        (1, (0, 0), [4, 4, 4], [(2, 0), (2, 0)]),
        (1, (0, 0), [4], [(2, 0)]),
        (1, (0, 0), [4, 1], [(2, 0)]),
        (1, (2, 1), [4], [(2, 1)]),
        (1, (2, 3), [4, 4], [(2, 0), (0, 3)]),
        (2, (2, 3), [4, 4, 4], [(2, 0), (2, 0), (0, 3)]),
        (None, (0, 0), [4], "trainer.nnodes"),
        (2, (0, 0), [4], "trainer.nnodes"),
        (1, (1, 3), [4, 4], [(2, 0), (0, 3)]),
        (1, (1, 3), [4], "trainer.nnodes"),
        (1, (0, 0), [1, 1], "trainer.n_gpus_per_node"),
    ],
)
def test_as_many_nodes_are_used_as_there_are_but_not_fewer_than_min_nodes(
    min_nodes: int | None, apart: tuple[int, int], nodes: list[int], found: list[tuple[int, int]] | str
) -> None:
    trainer = TrainerConfig(nnodes=2, n_gpus_per_node=2, min_nodes=min_nodes)
    engines = EnginesConfig(nnodes=apart[0], n_gpus_per_node=apart[1])
    offers = [(f"10.0.0.{number}", devices) for number, devices in enumerate(nodes)]
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=found):
            fit_nodes(offers, trainer, engines, "GPUs")
    else:
        assert fit_nodes(offers, trainer, engines, "GPUs") == found


def test_fewer_nodes_that_do_not_fit_are_refused_before_the_run() -> None:
    words = ["trainer.nnodes=2", "trainer.n_gpus_per_node=2", "worker.actor.fsdp.fsdp_size=4"]
    load_config([*BASE, *words])
    with pytest.raises(ConfigError, match=r"trainer.min_nodes.*with 1 nodes, worker.actor.fsdp.fsdp_size must divide"):
        load_config([*BASE, *words, "trainer.min_nodes=1"])
    with pytest.raises(ConfigError, match=r"trainer.min_nodes=3.*at most trainer.nnodes=2"):
        load_config([*BASE, *words, "trainer.min_nodes=3"])
