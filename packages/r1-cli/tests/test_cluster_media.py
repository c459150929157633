"""Pictures under several ranks: rendered on the machines, put down once, and never seen by the driver."""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_engines import as_set, hosts
from cli_media import CRASHES, Frail, dataset_of, host, make_renderer, media_of, one_worker, row
from cli_ranks import LOADS, STORE

from r1_cli.cluster.batch_transfer import pack_samples
from r1_cli.cluster.remote_rendering import RenderPool
from r1_cli.jobs.media import machines_of, start_media
from r1_cli.placement import Node, place_ranks
from r1_cli.train.groups.group import to_sample
from r1_data.dataset import Mixture
from r1_data.model_inputs import LazyInputs
from r1_data.render import Renderer
from r1_data.types import MediaError


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    for kept in (STORE, LOADS):  # other files' tests fill them, too
        kept.clear()
    yield
    for kept in (STORE, LOADS):
        kept.clear()


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer()


ROWS = [row(0), row(1, "none", 84), row(2, "<image>, larger", 112), row(3)]
ROWS[1][1]["images"] = []


def test_prompts_of_the_machines_are_those_of_one_process_and_hold_no_pixel(renderer: Renderer) -> None:
    machines = [host(renderer), host(renderer)]
    with media_of(machines) as media:
        here, there = dataset_of(ROWS, renderer), dataset_of(ROWS, renderer, media)
        assert len(there) == len(here) == 4
        there.prefetch(range(4))
        for number in (3, 0, 2, 1):
            own, other = here[number], there[number]
            assert pickle.dumps(other.model_inputs).find(b"storage") < 0
            assert (LOADS, isinstance(other.model_inputs, LazyInputs)) == ([], number != 1)
            bare = {"model_inputs": {}, "images": (), "videos": (), "position_ids": torch.zeros(1, len(own.token_ids))}
            assert str(replace(own, **bare)) == str(replace(other, **bare))
            assert torch.equal(own.position_ids, other.position_ids)
            assert len(other.images) == len(own.images)
            assert [one.tobytes() for one in other.images] == [one.tobytes() for one in own.images]
            assert own.model_inputs.keys() == other.model_inputs.keys()
            assert all(torch.equal(tensor, other.model_inputs[name]) for name, tensor in own.model_inputs.items())
            LOADS.clear()
    assert [[verb for verb, _ in one.asked].count("render") for one in machines] == [2, 1]
    sent = [size for one in machines for verb, size in one.asked if verb == "render"]
    assert max(sent) < 50_000  # of noise, which no encoding makes smaller: 37,632 bytes; its model inputs are 301,080


def test_pictures_are_stored_once_a_prompt_for_engines_and_ranks_and_not_once_a_sample(renderer: Renderer) -> None:
    with media_of([host(renderer, dtype=torch.bfloat16)]) as media:
        prompts = [dataset_of(ROWS, renderer, media)[number] for number in (0, 2, 3)]
        as_set(hosts(2))._prepare(prompts)
        samples = [to_sample(prompt, [answer]) for prompt in prompts for answer in range(5)]
        columns = pack_samples(samples, lambda value: pytest.fail("a picture was put down again"), torch.bfloat16)
        stored = sum(len(head) + sum(map(len, buffers)) for head, buffers in STORE)
        assert len(STORE) == len(columns.inputs) == 3
        whole = [prompt.model_inputs for prompt in prompts]
        assert {tensor.dtype for inputs in whole for tensor in inputs.values()} == {torch.bfloat16, torch.int64}
        assert stored <= 1.02 * sum(tensor.nbytes for inputs in whole for tensor in inputs.values())


def test_media_stay_decoded_on_their_machine_as_far_as_there_is_memory(
    renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded, load = [], Renderer.load
    monkeypatch.setattr(Renderer, "load", lambda self, example: decoded.append(example.id) or load(self, example))
    with media_of([host(renderer, memory=3 * 84 * 84)]) as media:
        dataset = dataset_of(ROWS, renderer, media)
        for _ in range(2):
            first, second = dataset[0], dataset[3]
        assert decoded == ["rows.parquet:0", "rows.parquet:3", "rows.parquet:3"]
        assert first.images[0].size == second.images[0].size == (84, 84)
        assert second.images[0] is second.images[0]
        assert decoded[3:] == ["rows.parquet:3"]


def test_what_one_machine_cannot_read_is_asked_of_the_drivers_before_it_is_bad(
    renderer: Renderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{number}.png" for number in range(4)]
    rows = [row(number) for number in range(4)]
    for file, (_, content) in zip(files, rows, strict=True):
        file.write_bytes(content["images"][0])
        content["images"] = [str(file)]
    far, home = host(renderer), host(renderer)
    elsewhere: Any = far.rank

    def unseen(key: Any, example: Any) -> Any:
        raise MediaError(f"{example.id}: no such file")

    monkeypatch.setattr(elsewhere, "render", unseen)
    with media_of([home, far]) as media:
        dataset = dataset_of(rows, renderer, media)
        dataset.prefetch(range(3))
        assert [dataset[number].ground_truth for number in range(3)] == ["0", "1", "2"]
        assert [verb for verb, _ in far.asked] == []  # it answered nothing
        files[3].write_bytes(files[3].read_bytes()[:300])
        with pytest.raises(MediaError, match=r"rows\.parquet:3: .*3\.png"):
            dataset[3]


@pytest.mark.slow
def test_a_row_that_breaks_its_worker_is_named_and_the_worker_renewed() -> None:
    renderer = make_renderer(Frail)
    with media_of([host(renderer, one_worker)]) as media:
        dataset = dataset_of([row(0, f"<image>{CRASHES}"), row(1)], renderer, media)
        dataset.prefetch(range(2))
        with pytest.raises(MediaError, match=r"rows\.parquet:0: its worker process ended by itself \(exit code 7\)"):
            dataset[0]
        own, other = dataset_of([row(1)], renderer)[0], dataset[1]
        assert torch.equal(own.model_inputs["pixel_values"], other.model_inputs["pixel_values"])


def test_machines_start_before_or_with_the_first_picture_and_nothing_is_rendered_after_the_end(
    renderer: Renderer,
) -> None:
    started: list[Any] = []

    def start() -> list[Any]:
        started.append(host(renderer))
        return started

    media = RenderPool(start, 1, 2)
    dataset = dataset_of(ROWS, renderer, media)
    start_media(None, Mixture([dataset]))
    start_media(media, Mixture([dataset_of(ROWS[1:2], renderer)]))
    assert (dataset[1].model_inputs, started) == ({}, [])
    start_media(media, Mixture([dataset]))
    assert len(dataset[0].images) == len(started) == 1
    media.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        dataset[0]


def test_machines_are_the_drivers_own_first_and_each_once() -> None:
    head, one, two = Node("a", "10.0.0.1", ()), Node("b", "10.0.0.2", ("0", "1")), Node("c", "10.0.0.3", ("0",))
    assert machines_of(head, place_ranks([two, one])) == [head, one, two]
    assert [node.id for node in machines_of(Node("c", "10.0.0.3", ()), place_ranks([two, one]))] == ["c", "b"]
