"""A pool pushes full weights and adapters: no server answers with others, and what none can load is refused."""

import re

import pytest
import torch
from fake_vllm import FakeServer
from server_pools import PARAMS, Pools, WeightsElsewhere, adapter, all_ready, prompts, take, wait_for, weights
from vllm_cases import adapter_bytes, bytes_in

from r1_rollout.errors import WeightsError
from r1_rollout.lora import Adapter
from r1_rollout.vllm.servers.pooled_server import Deadlines
from r1_rollout.vllm.servers.supervisor import ServersLost
from r1_rollout.weights import LocalWeights


def test_every_server_holds_the_new_weights_before_it_serves(pools: Pools) -> None:
    fakes = [FakeServer() for _ in range(3)]
    pool = pools.open(*fakes, max_sequences=2)
    for version in range(3):
        with pool.active(LocalWeights(weights(), version)):
            list(pool.generate(prompts(30), PARAMS))
    for fake in fakes:
        assert [label.partition("-")[0] for label in fake.loads] == ["0", "1", "2"]
        assert set(fake.served) <= set(fake.loads)
    assert not list(pool._root.glob("[01]-*"))  # older weights have left the disk


def test_weights_are_pushed_from_the_process_that_has_them(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    with pool.active(WeightsElsewhere()):
        groups = dict(pool.generate(prompts(5), PARAMS))
    assert {one.weight_version for group in groups.values() for one in group} == {3}
    assert [label.partition("-")[0] for label in fake.loads] == ["3"]
    with pytest.raises(WeightsError, match=r"w2 is missing, was \[4\]"):
        pool.load_weights(LocalWeights(weights(2), 4))


def test_updated_weights_are_sampled_from_until_others_come_awake_or_not(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    for version in range(2):
        pool.load_weights(LocalWeights(weights(), version))
        for _ in range(2):
            ((_, group),) = pool.generate(prompts(1), PARAMS)
            assert group[0].weight_version == version
    with pool.active():
        ((_, group),) = pool.generate(prompts(1), PARAMS)
    assert group[0].weight_version == 1
    assert len(fake.loads) == 2


def test_older_weights_are_refused_and_the_newer_ones_go_on(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    pool.load_weights(LocalWeights(weights(), 5))
    with pytest.raises(WeightsError, match="version 1 are older than version 5"):
        pool.load_weights(LocalWeights(weights(), 1))
    ((_, group),) = pool.generate(prompts(1), PARAMS)
    assert group[0].weight_version == 5
    with pytest.raises(WeightsError, match="w2 is missing"):
        pool.load_weights(LocalWeights(weights(2), 6))
    with pytest.raises(WeightsError, match="version 4 are older than version 5"):
        pool.load_weights(LocalWeights(weights(), 4))
    pool.load_weights(LocalWeights(weights(), 5))
    assert len(fake.loads) == 2


def test_a_server_that_keeps_its_old_weights_never_serves(pools: Pools) -> None:
    stale, good = FakeServer(), FakeServer()
    stale.keeps_old_weights = True
    pool = pools.open(stale, good)
    with pool.active(LocalWeights(weights(), 0)):
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
    assert not stale.requests
    alone = pools.open(stale, deadlines=Deadlines(stall=60, load=60, probe=0.01, recovery=0.5))
    with pytest.raises(ServersLost, match=r"holds .* not 4-"), alone.active(LocalWeights(weights(), 4)):
        pass


def test_a_server_that_comes_back_with_other_weights_gets_the_current_ones_first(pools: Pools) -> None:
    fake, other = FakeServer(), FakeServer()
    pool = pools.open(fake, other, max_sequences=2)
    with pool.active(LocalWeights(weights(), 3)):
        fake.down = True
        assert len(dict(pool.generate(prompts(10), PARAMS))) == 10
        fake.forget()  # somebody has started it anew
        fake.down = False
        wait_for(lambda: len(fake.loads) == 2)
        wait_for(lambda: all_ready(pool))
        before = len(fake.requests)
        other.gate.clear()
        assert len(list(take(pool.generate(prompts(10), PARAMS), 5))) == 5
    assert len(fake.requests) > before
    assert fake.loads[0] == fake.loads[1]
    assert set(fake.served) == {fake.loads[0]}


def test_weights_that_no_server_can_load_end_the_push_at_once(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes)
    for fake in fakes:
        fake.rejects_weights = True
    with (
        pytest.raises(WeightsError, match=r"no module named w0(.*\n)*.*no module named w0"),
        pool.active(LocalWeights(weights(), 0)),
    ):
        pass
    assert not list(pool._root.iterdir())
    for fake in fakes:
        fake.rejects_weights = False
    with pool.active(LocalWeights(weights(), 0)):
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20


def test_a_server_that_alone_rejects_the_weights_is_taken_out(pools: Pools) -> None:
    bad, good = FakeServer(), FakeServer()
    pool = pools.open(bad, good)
    bad.rejects_weights = True
    with pool.active(LocalWeights(weights(), 0)):
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
        assert not bad.requests
        bad.rejects_weights = False
        wait_for(lambda: all_ready(pool))
    assert bad.loads == good.loads


def test_weights_of_other_names_or_shapes_than_the_first_never_reach_a_server(pools: Pools) -> None:
    fake = FakeServer()
    pool = pools.open(fake)
    with pool.active(LocalWeights(weights(), 0)):
        pass
    for wrong, message in [
        (weights(2), "1 weights are not those of the first sync: w2 is missing, was [4]"),
        (weights(4), "w3 is [4], was unknown"),
        ([*weights(2), ("w2", torch.ones(2, 2))], "w2 is [2, 2], was [4]"),
    ]:
        with pytest.raises(WeightsError, match=re.escape(message)), pool.active(LocalWeights(wrong, 1)):
            pass
    with pool.active(LocalWeights(weights(), 1)):
        assert len(dict(pool.generate(prompts(5), PARAMS))) == 5
    assert [label.partition("-")[0] for label in fake.loads] == ["0", "1"]
    assert len(list(pool._root.iterdir())) == 1


def test_adapters_alone_go_over_the_full_weights_that_came_last(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes)
    with pool.active(LocalWeights(weights(), 0)):
        list(pool.generate(prompts(4), PARAMS))
    for version in (1, 2, 3):
        with pool.active(LocalWeights(adapter(), version)):
            groups = dict(pool.generate(prompts(10), PARAMS))
            assert pool.logprobs_of(prompts(1), [[7]]) == [[-0.07]]
        assert {one.weight_version for group in groups.values() for one in group} == {version}
    for fake in fakes:
        assert [label.partition("-")[0] for label in fake.loads] == ["0", "1", "2", "3"]
        assert fake.adapters == [fake.loads[-1]]
        assert fake.base == fake.loads[0]
        assert {body.get("model") for body in fake.requests} <= {None, *fake.loads[1:]}
    assert sorted(folder.name.partition("-")[0] for folder in pool._root.iterdir()) == ["0", "2", "3"]
    (last,) = pool._root.glob("3-*")  # all that crosses is what it holds
    assert bytes_in(last) == adapter_bytes(adapter())
    before = [len(fake.requests) for fake in fakes]
    with pool.active(LocalWeights(weights(), 4)):
        list(pool.generate(prompts(4), PARAMS))
    after = [body for fake, start in zip(fakes, before, strict=True) for body in fake.requests[start:]]
    assert len(after) == 4
    assert not any("model" in body for body in after)


def test_a_server_that_comes_back_gets_the_base_and_then_the_adapter(pools: Pools) -> None:
    fake, other = FakeServer(), FakeServer()
    pool = pools.open(fake, other, max_sequences=2)
    with pool.active(LocalWeights(weights(), 0)):
        pass
    with pool.active(LocalWeights(adapter(), 1)):
        fake.forget()  # the pool learns of it from the requests: there is no such model
        assert len(dict(pool.generate(prompts(20), PARAMS))) == 20
        wait_for(lambda: all_ready(pool))
    assert fake.loads == [*other.loads, *other.loads]


def test_an_adapter_without_a_base_or_without_modules_is_refused(pools: Pools) -> None:
    fakes = [FakeServer(), FakeServer()]
    pool = pools.open(*fakes)
    with pytest.raises(WeightsError, match="before the full weights"), pool.active(LocalWeights(adapter(), 0)):
        pass
    with pool.active(LocalWeights(weights(), 0)):
        pass
    with pytest.raises(WeightsError, match="holds no weights"), pool.active(LocalWeights(Adapter(2, 4.0, (), []), 1)):
        pass
    for fake in fakes:
        fake.binds = False
    with (
        pytest.raises(WeightsError, match=r"bound to nothing.*layers\.7\.q_proj"),
        pool.active(LocalWeights(adapter(), 1)),
    ):
        pass
    with pool.active(LocalWeights(weights(), 1)):
        assert len(dict(pool.generate(prompts(5), PARAMS))) == 5
