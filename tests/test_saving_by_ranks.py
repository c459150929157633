"""Checkpoints that ranks write: the driver names them and every command reads them."""

import pytest
import ranks
import saving_ranks
import torch
from families import make_config, make_processor, save_model
from loading_ranks import load

from r1_cli.checkpoint.folders import CheckpointStore
from r1_cli.jobs.merge import merge
from r1_cli.models.files import ModelFiles, save_assets

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model("qwen2", tmp_path_factory.mktemp("model"))


def write(store, step, model, dies=False):
    """What the loop does: the ranks save, the driver adds the rest and gives the folder its name."""

    def save(folder):
        ranks.run(saving_ranks.save, model, folder, dies)
        save_assets(
            ModelFiles(model, make_config("qwen2"), make_processor("qwen2"), make_processor("qwen2")), folder / "actor"
        )

    return store.publish(store.write(step, save, {"step": step}))


def test_every_command_reads_what_ranks_have_written_in_many_files(model, tmp_path):
    actor = write(CheckpointStore(tmp_path), 1, model) / "actor"
    assert len([*actor.glob("model-*-of-*.safetensors")]) > 3
    expected = dict(saving_ranks.learner_for(model).weights())
    merged = merge(actor.parent, tmp_path / "merged")
    assert [file.name for file in merged.glob("*.safetensors*")] == ["model.safetensors"]
    for folder in (actor, merged):
        found = load(str(folder)).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(model, tmp_path):
    store = CheckpointStore(tmp_path, limit=1)
    write(store, 1, model)
    with pytest.raises(AssertionError, match="rank 1:\nended without a word"):
        write(store, 2, model, dies=True)
    assert store.steps() == [1]
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_1", "checkpoint_tracker.json", ".draft_2"}
    write(store, 2, model)
    assert store.steps() == [2]
    assert not list(tmp_path.glob(".draft*"))
