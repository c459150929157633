"""A folder that a node does not see, or sees as another, is named before anything is loaded."""

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from r1_cli.checkpoint.shared_filesystem import Unseen, shown_folders
from r1_cli.config import ConfigError, load_config
from r1_cli.jobs.learner import require_shared_folders
from r1_cli.placement import Node, place_ranks

WRITTEN, READ = "trainer.save_checkpoint_path", "worker.actor.model.model_path"


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """The checkpoints' folder, not made yet, and the model's."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    return tmp_path / "deep" / "run", model


def test_a_node_that_shares_the_folders_sees_them_and_nothing_stays_behind(folders: tuple[Path, Path]) -> None:
    run, model = folders
    with shown_folders((WRITTEN, run), {READ: model, "trainer.load_checkpoint_path": Path("owner/name")}) as proof:
        assert pickle.loads(pickle.dumps(proof)).find_unseen() == []
        assert [listing.key for listing in proof.listings] == [READ]
        assert len([*run.iterdir()]) == 1
    assert [*run.iterdir()] == []
    assert proof.find_unseen() == [
        Unseen(WRITTEN, str(run), "is another folder there, set one on a disk that all nodes share")
    ]


def test_a_folder_of_another_machine_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, model = folders
    with shown_folders((WRITTEN, run), {READ: model}) as proof:
        elsewhere = replace(
            proof,
            token=replace(proof.token, folder=str(tmp_path / "not here")),
            listings=(replace(proof.listings[0], folder=str(tmp_path / "nor here")),),
        )
        assert elsewhere.find_unseen() == [
            Unseen(WRITTEN, str(tmp_path / "not here"), "is no folder there, set one on a disk that all nodes share"),
            Unseen(
                READ,
                str(tmp_path / "nor here"),
                "is no folder there, set one that all nodes see, or copy it to the same place on each",
            ),
        ]
        (run / proof.token.name).write_text("of another run")
        assert proof.find_unseen()[0].why == "is another folder there, set one that all nodes share"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda model: (model / "model.safetensors").write_bytes(b"cut"), "model.safetensors has another size"),
        (lambda model: (model / "more.safetensors").touch(), "more.safetensors is one more"),
    ],
)
def test_a_copy_of_the_model_that_differs_is_named_by_file(change, says, folders: tuple[Path, Path]) -> None:  # type: ignore[no-untyped-def]
    run, model = folders
    with shown_folders((WRITTEN, run), {READ: model}) as proof:
        (model / "notes.txt").touch()
        assert proof.find_unseen() == []
        change(model)
        assert proof.find_unseen() == [
            Unseen(READ, str(model), f"has other files there ({says}), they are to be the same on all nodes")
        ]


def test_a_folder_that_a_node_cannot_write_to_is_named(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with shown_folders((WRITTEN, folders[0]), {}) as proof:
        monkeypatch.setattr(Path, "touch", refuse)
        assert "cannot be written to there (Read-only file system)" in proof.find_unseen()[0].why


class Nodes:
    """Actors on two nodes, the second of which has other disks."""

    def create(self, maker: Any, each: list[tuple[Any, ...]]) -> None:
        self.held = [maker(*arguments) for arguments in each]

    def call_all(self, verb: str) -> list[Any]:
        own, other = self.held
        own_disk = replace(other.token, folder="/nowhere/run")
        return [getattr(own, verb)(), getattr(replace(other, token=own_disk), verb)()]


def test_a_run_is_refused_with_the_node_and_the_key_before_anything_is_loaded(folders: tuple[Path, Path]) -> None:
    run, model = folders
    words = [
        f"trainer.save_checkpoint_path={run}",
        f"worker.actor.model.model_path={model}",
        "data.train_files=a@train",
    ]
    config = load_config([*words, "worker.reward.reward_function=math"])[0]
    placements = place_ranks([Node("a", "node 0", ("cpu",)), Node("b", "node 1", ("cpu",))])
    with pytest.raises(ConfigError, match=r"trainer\.save_checkpoint_path=.*node 1 it is no folder"):
        require_shared_folders(config, Nodes(), placements)
