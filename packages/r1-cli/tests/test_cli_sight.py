"""A folder that a node does not see, or sees as another, is named before anything is loaded."""

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from r1_cli.state.sight import find_unseen, shown_folders

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
        assert find_unseen(pickle.loads(pickle.dumps(proof))) == []
        assert [listing.key for listing in proof.listings] == [READ]
        assert len([*run.iterdir()]) == 1
    assert [*run.iterdir()] == []
    assert find_unseen(proof) == [f"{WRITTEN}={run} is another folder here: set one on a disk that all nodes share"]


def test_a_folder_of_another_machine_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, model = folders
    with shown_folders((WRITTEN, run), {READ: model}) as proof:
        elsewhere = replace(
            proof,
            token=replace(proof.token, folder=str(tmp_path / "not here")),
            listings=(replace(proof.listings[0], folder=str(tmp_path / "nor here")),),
        )
        assert find_unseen(elsewhere) == [
            f"{WRITTEN}={tmp_path / 'not here'} is no folder here: set one on a disk that all nodes share",
            f"{READ}={tmp_path / 'nor here'} is no folder here: set one that all nodes see, or copy it to the same "
            "place on each",
        ]
        (run / proof.token.name).write_text("of another run")
        assert find_unseen(proof)[0].endswith("is another folder here: set one that all nodes share")


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
        assert find_unseen(proof) == []
        change(model)
        assert find_unseen(proof) == [f"{READ}={model}: {says} here; its files are to be the same on all nodes"]


def test_a_folder_that_a_node_cannot_write_to_is_named(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    with shown_folders((WRITTEN, folders[0]), {}) as proof:
        monkeypatch.setattr(Path, "touch", refuse)
        assert "cannot be written to here (Read-only file system)" in find_unseen(proof)[0]
