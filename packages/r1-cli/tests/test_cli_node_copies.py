"""Copies in the memory of several nodes: any node can be lost, and no damaged or torn part is used."""

import re
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from r1_cli.checkpoint import memory, node_copies
from r1_cli.checkpoint.damage import find_damage
from r1_cli.checkpoint.folders import CheckpointError, CheckpointStore
from r1_cli.checkpoint.node_copies import NodeCopies
from r1_cli.cluster.copies import ClusterCopies
from r1_cli.cluster.worker_group import ClusterError
from r1_cli.config import RunConfig
from r1_cli.jobs import logs as jobs
from r1_cli.placement import Node, Placement, place_ranks
from r1_core.disk import write_text
from r1_core.learner.tensor_files import save

NODES = 3


class Hosts:
    """The processes of the nodes, as objects of this one."""

    def __init__(self, run: Path, nodes: range) -> None:
        def caller(number: int) -> Callable[..., Any]:
            return lambda verb, *args: getattr(self.each[number], verb)(*args)

        self.each = [NodeCopies(run, f"node{n}", at, caller(at - 1)) for at, n in enumerate(nodes)]
        self.dead = False

    def call_all(self, verb: str, *args: Any) -> list[Any]:
        if self.dead:
            raise ClusterError("copies-1 on 10.0.0.2 died")
        return [getattr(one, verb)(*args) for one in self.each]

    def call(self, verb: str, *args: Any) -> Any:
        return self.call_all(verb, *args)[0]

    def call_first(self, verb: str, *args: Any) -> Any:
        return getattr(self.each[0], verb)(*args)


class Ranks:
    """One rank on each node, of which the first also writes the index that names the files of all."""

    folders: list[Path]

    def call(self, verb: str, folders: list[Path]) -> None:
        assert verb == "set_copies_folder"
        self.folders = folders

    def write(self, step: int, folder: Path) -> None:
        files = [f"model-{n:05d}-of-{len(self.folders):05d}.safetensors" for n, _ in enumerate(self.folders, 1)]
        for number, (own, file) in enumerate(zip(self.folders, files, strict=True)):
            (own / folder).mkdir()
            save({f"layer{number}": torch.full((4,), float(step))}, own / folder / file)
        names = ", ".join(f'"layer{number}": "{file}"' for number, file in enumerate(files))
        write_text(self.folders[0] / folder / "model.safetensors.index.json", f'{{"weight_map": {{{names}}}}}')


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "RAM_DISK", tmp_path / "shm")
    monkeypatch.setattr(node_copies, "CHUNK", 50)  # files of several chunks
    (tmp_path / "shm").mkdir()
    (tmp_path / "run").mkdir()
    return tmp_path / "shm"


def opened(shm: Path, nodes: range = range(NODES)) -> tuple[ClusterCopies, Hosts, Ranks]:
    run = shm.parent / "run"
    hosts, ranks = Hosts(run, nodes), Ranks()
    return ClusterCopies(run, hosts, ranks, [*range(len(nodes))]), hosts, ranks


def write(copies: ClusterCopies, ranks: Ranks, step: int) -> None:
    def fill(folder: Path) -> None:
        ranks.write(step, copies.folder_on_ranks(folder / "actor"))
        (folder / "stream.json").write_text(f"[{step}]")

    copies.publish(copies.write(step, fill, {"step": step, "model_only": False}))


def written(shm: Path) -> list[Path]:
    """Write three steps; return each node's folder."""
    copies, _, ranks = opened(shm)
    copies.open()
    for step in (1, 2, 3):
        write(copies, ranks, step)
    return [Path(line) for line in (shm.parent / "run" / memory.POINTER).read_text().splitlines()]


def restored(shm: Path) -> tuple[int | None, CheckpointStore]:
    store = CheckpointStore(shm.parent / "run")
    copies, *_ = opened(shm, range(NODES, NODES + 2))  # fewer nodes, with other names
    return copies.restore(store), store


@pytest.mark.parametrize("lost", range(NODES))
def test_any_node_can_be_lost_with_its_memory(shm: Path, lost: int) -> None:
    shutil.rmtree(written(shm)[lost])
    step, store = restored(shm)
    assert (step, store.steps(), store.damaged()) == (3, [3], {})
    assert find_damage(store.path(3), contents=True) is None
    tensors = {k: v for file in store.path(3).glob("actor/*.safetensors") for k, v in load_file(file).items()}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {f"layer{n}": [3.0] * 4 for n in range(NODES)}
    assert (store.path(3) / "stream.json").read_text() == "[3]"


def test_two_nodes_of_three_are_one_too_many(shm: Path) -> None:
    for folder in written(shm)[:2]:
        shutil.rmtree(folder)
    assert restored(shm)[0] is None


def test_a_damaged_part_is_replaced_by_the_neighbours_and_a_step_that_is_damaged_twice_by_the_one_before(
    shm: Path,
) -> None:
    folders = written(shm)
    parts = [folders[1] / "own/global_step_3", folders[2] / "neighbour/global_step_3"]
    files = [next(part.glob("actor/*.safetensors")) for part in parts]
    assert files[0].read_bytes() == files[1].read_bytes()
    for number, expected in enumerate((3, 2)):
        files[number].write_bytes(files[number].read_bytes()[:-1] + b"\1")
        step, store = restored(shm)
        assert step == expected
        shutil.rmtree(store.path(expected))


def test_a_torn_copy_is_not_used_and_a_checkpoint_that_is_as_new_is_preferred(shm: Path) -> None:
    for folder in written(shm):
        for part in (folder / "own", folder / "neighbour"):
            (part / "global_step_3").rename(part / ".draft_3")  # the run was killed before they were published
    step, store = restored(shm)
    assert step == 2
    assert restored(shm)[0] is None
    assert store.steps() == [2]


def test_a_new_start_removes_older_copies_and_the_end_of_the_run_all(shm: Path) -> None:
    older = written(shm)
    copies, _, ranks = opened(shm)
    copies.open()
    assert not any(folder.exists() for folder in older)
    write(copies, ranks, 4)
    assert len([*shm.glob("*/own/global_step_4")]) == len([*shm.glob("*/neighbour/global_step_4")]) == NODES
    assert {folder.stat().st_mode & 0o777 for folder in shm.iterdir()} == {0o700}
    copies.remove()
    assert not [*shm.iterdir()]
    assert not (shm.parent / "run" / memory.POINTER).exists()


def test_copies_keep_two_steps_and_the_nodes_files_lie_with_the_next_node(shm: Path) -> None:
    folders = written(shm)
    for own, other in pairwise([*folders, folders[0]]):
        assert sorted(path.name for path in (own / "own").glob("global_step_*")) == ["global_step_2", "global_step_3"]
        names = [
            {path.name for path in (folder / kind / "global_step_3").rglob("*")}
            for folder, kind in ((own, "own"), (other, "neighbour"))
        ]
        assert names[0] == names[1]


def test_each_node_must_have_space_for_its_share_and_that_of_the_node_before(
    shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "checkpoint_bytes", lambda config: 200)
    two = Placement(place_ranks([Node("a", "10.0.0.1", ("cpu",) * 4), Node("b", "10.0.0.2", ("cpu",) * 4)]))
    copies, *_ = opened(shm, range(2))
    for free, short in ([700, 700], None), ([700, 699], "7 of about 100 B each need more than the 699 B .*10.0.0.2"):
        monkeypatch.setattr(copies, "_free", free)
        told = jobs.find_short(RunConfig(), two, copies)
        assert re.match(short, told or "") if short else told is None


def test_a_process_that_holds_copies_and_dies_ends_the_copies(shm: Path) -> None:
    copies, hosts, ranks = opened(shm)
    copies.open()
    hosts.dead = True
    with pytest.raises(CheckpointError, match=r"copies-1 on 10\.0\.0\.2 died"):
        write(copies, ranks, 1)
