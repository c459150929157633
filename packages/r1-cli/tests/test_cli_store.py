"""A step's batch that the machines' shared memory cannot hold is refused before anything is loaded."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from cli_media import dataset_of, make_renderer, row

from r1_cli.cluster.ray_cluster import shared_bytes, store_bytes
from r1_cli.config import ConfigError, load_config
from r1_cli.hardware import Hardware
from r1_cli.jobs import media
from r1_cli.jobs.media import inputs_dtype, require_store_for_batch
from r1_cli.placement import Node, place_ranks
from r1_cli.plan.disk import StoredBatch, require_store
from r1_cli.plan.model_sizes import TextSizes
from r1_data.dataset import Mixture
from r1_data.references import Video
from r1_data.types import Example

SMALL, LARGE, UNKNOWN = (Node(f"n{i}", f"10.0.0.{i}", ("0",), store) for i, store in enumerate((10**7, 10**9, None)))
TWO = [
    "data.train_files=owner/rows@train", "worker.actor.model.model_path=owner/model", "trainer.n_gpus_per_node=2",
    "worker.reward.reward_function=math", "data.rollout_batch_size=4", "worker.actor.global_batch_size=4",
]  # fmt: skip


def test_a_batch_is_its_prompts_pictures_once_and_its_samples_tokens() -> None:
    assert StoredBatch(512, 4096, 2048, input_bytes=6.4e6).size == 512 * 6_400_000 + 4096 * 2048 * 12
    assert StoredBatch(1, 1, 0, input_bytes=0.0).size == 0
    assert StoredBatch(512, 4096, 2048, input_bytes=0.0, routed_bytes=48 * 8).size == 4096 * 2048 * (12 + 384)


@pytest.mark.parametrize("nodes", [[LARGE], [LARGE, UNKNOWN], [UNKNOWN]])
def test_what_fits_or_is_not_known_passes(nodes: list[Node]) -> None:
    require_store(nodes, StoredBatch(16, 128, 2048, input_bytes=10**6))


def test_too_little_is_told_by_machine_with_what_there_is_and_what_to_set() -> None:
    with pytest.raises(ConfigError) as refused:
        require_store([SMALL, LARGE, UNKNOWN], StoredBatch(16, 128, 1000, input_bytes=10**6))
    message = str(refused.value)
    assert "data.rollout_batch_size=16: a step's batch takes about 17.5 MB, of which pictures 1 MB a prompt" in message
    assert "10.0.0.0 has 10 MB." in message
    assert "10.0.0.1" not in message
    for word in ("--shm-size", "--object-store-memory", "data.max_pixels", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE=1"):
        assert word in message


def test_a_store_is_no_larger_than_the_shared_memory_it_lies_in(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [{"NodeID": "a", "Resources": {"CPU": 2.0, "object_store_memory": 5e9}}, {"NodeID": "b", "Resources": {}}]
    assert [store_bytes(nodes, "a", shared) for shared in (6.7e7, 8e9, inf)] == [67_000_000, 5_000_000_000, None]
    assert store_bytes(nodes, "b", 8e9) is store_bytes(nodes, "c", 8e9) is None
    assert shared_bytes() > 0
    monkeypatch.setenv("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE", "1")
    assert shared_bytes() == inf


def test_model_inputs_are_counted_from_headers_as_they_will_be() -> None:
    renderer = make_renderer()
    rows = [row(number, side=56 + 28 * number) for number in range(4)]
    dataset = dataset_of(rows, renderer)
    counts = [dataset[number].model_inputs["pixel_values"].numel() for number in range(4)]
    assert dataset.mean_values() == sum(counts) / 4
    assert dataset.mean_values(2) == (counts[0] + counts[2]) / 2
    frames = tuple(content["images"][0] for _, content in [row(number, side=56) for number in range(4)])
    content = [{"type": "video"}, {"type": "text", "text": "?"}]
    clip = Example("clip", [{"role": "user", "content": content}], (Video(frames),), "")
    assert renderer.count_values(clip) == renderer.render(clip).model_inputs["pixel_values_videos"].numel()


def test_the_check_is_of_the_runs_own_rows_in_the_precision_that_they_cross_in() -> None:
    config, hardware = load_config(TWO)[0], Hardware("cpu")
    prompts = Mixture([dataset_of([row(0), row(1)], make_renderer())])
    exact = 4 * prompts[0].model_inputs["pixel_values"].numel() * inputs_dtype(config, hardware).itemsize
    require_store_for_batch(config, hardware, [], prompts)
    require_store_for_batch(
        config, hardware, place_ranks([Node("n", "10.0.0.1", ("cpu",), 2 * exact + 10**9)]), prompts
    )
    with pytest.raises(ConfigError, match=r"rollout_batch_size=4: .*10\.0\.0\.1 has"):
        require_store_for_batch(config, hardware, place_ranks([Node("n", "10.0.0.1", ("cpu",), exact)]), prompts)


def test_the_experts_of_replayed_routers_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = TextSizes(layers=48, hidden=64, keys=64, width=64, experts=128, chosen=8)
    assert [replace(mixture, experts=experts).routed_bytes for experts in (1, 128, 512)] == [0, 48 * 8, 2 * 48 * 8]
    batches = list[StoredBatch]()
    monkeypatch.setattr(media, "read_sizes", lambda model: SimpleNamespace(text=mixture))
    monkeypatch.setattr(media, "require_store", lambda nodes, batch: batches.append(batch))
    placements = place_ranks([Node("n", "10.0.0.1", ("cpu",), 1)])
    prompts = Mixture([dataset_of([row(0)], make_renderer())])
    for words in ([], ["worker.actor.router_replay=true", "worker.rollout.name=embedded"]):
        require_store_for_batch(load_config([*TWO, *words])[0], Hardware("cpu"), placements, prompts)
    assert [batch.routed_bytes for batch in batches] == [0, 48 * 8]
