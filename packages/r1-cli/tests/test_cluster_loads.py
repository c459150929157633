"""What is reported of all ranks: who has how many tokens, throughput and MFU of all devices, the fullest's memory."""

from typing import Any

import pytest
import torch

from r1_cli.cluster.rank import TokenBalance
from r1_cli.cluster.rank_client import RankClient, RankedPolicy
from r1_cli.hardware import PEAK_FLOPS
from r1_cli.train.metrics.step import performance, sequence_balance
from r1_core.learner.batching import Batching, MicroLimit
from r1_core.learner.trainable import LearnerInfo
from r1_core.types import Sample

GIGABYTE = 2**30


def samples_of(*lengths: int) -> list[Sample]:
    return [
        Sample(torch.arange(n), torch.arange(n) > 0, torch.arange(n)[None], number, 0.0)
        for number, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("padding_free", [True, False])
def test_loads_add_up_the_updates_of_a_step_round_by_round(padding_free: bool) -> None:
    loads, batching = TokenBalance(2), Batching(padding_free, MicroLimit(1), MicroLimit(1))
    assert (loads.tokens, loads.straggler) == ([0, 0], 1.0)
    loads.add(samples_of(5, 3, 2), batching)
    assert (loads.tokens, loads.straggler) == ([7, 3], 7 / 5)
    loads.add(samples_of(4, 4), batching)
    assert (loads.tokens, loads.straggler) == ([11, 7], 11 / 9)


def test_tokens_of_ranks_are_reported_as_they_are_and_as_they_would_be_in_order() -> None:
    one = sequence_balance([3, 4])
    assert one.pop("global_seqlen/minmax_diff") == 0
    assert set(one.values()) == {7.0}
    assert sequence_balance([5, 3, 2, 2], [14, 10]) == {  # two epochs
        "global_seqlen/mean": 6.0, "global_seqlen/max": 8.0, "global_seqlen/min": 4.0, "global_seqlen/minmax_diff": 4.0,
        "global_seqlen/balanced_max": 7.0, "global_seqlen/balanced_min": 5.0,
    }  # fmt: skip
    few = sequence_balance([5], [5, 0])
    assert (few["global_seqlen/min"], few["global_seqlen/balanced_min"], few["global_seqlen/mean"]) == (0.0, 0.0, 2.5)
    assert sequence_balance([5, 3], [0, 0])["global_seqlen/balanced_max"] == 5.0  # nothing was learned from them


class Devices:
    """Ranks of which each tells of its own device."""

    def __init__(self, peaks: list[int]) -> None:
        self._peaks = peaks

    def call_all(self, verb: str, *args: Any, label: str) -> list[LearnerInfo]:
        return [LearnerInfo(7, 6e9, "NVIDIA H200", peak, peak + GIGABYTE, tokens=(7, 5)) for peak in self._peaks]


def test_performance_is_of_all_devices_and_memory_of_the_fullest() -> None:
    ranks: Any = Devices([GIGABYTE, 5 * GIGABYTE, 2 * GIGABYTE, GIGABYTE])
    info = RankedPolicy(RankClient(ranks)).describe()
    seconds = {"step": 2.0, "gen": 1.0, "update_actor": 0.5}
    found = performance(samples_of(5, 3, 2, 2), seconds, info, ppo_epochs=3)
    assert found["perf/total_num_tokens"] == 12
    assert found["perf/throughput"] == 12 / 2.0 / 4
    assert found["perf/mfu_actor"] == pytest.approx(12 * 3 * 6e9 / 0.5 / (4 * PEAK_FLOPS["H200"]))
    assert (found["perf/max_memory_allocated_gb"], found["perf/max_memory_reserved_gb"]) == (5.0, 6.0)
    assert (found["global_seqlen/balanced_max"], found["global_seqlen/max"]) == (7.0, 8.0)
