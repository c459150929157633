"""Checkpoints of several ranks: written by all, each holding little, and the same as those of one process."""

import checkpoint_ranks
import pytest
import ranks
from checkpoint_ranks import FILE_BYTES, learner_for, step, weights


@pytest.fixture
def single(tmp_path):
    """A checkpoint of one process after a step, in many files."""
    learner = learner_for()
    step(learner)
    learner.save(tmp_path / "single", file_bytes=FILE_BYTES)
    assert len([*(tmp_path / "single").glob("*-of-*.safetensors")]) > 6
    return tmp_path / "single"


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def assert_goes_on(folder):
    """One process takes from `folder` the step that it would have taken without a stop."""
    learner, resumed = learner_for(), learner_for()
    step(learner)
    resumed.load(folder)
    assert step(resumed) == step(learner)
    assert all(tensor.equal(weights(resumed)[name]) for name, tensor in weights(learner).items())


@pytest.mark.parametrize("shard_size", [-1, 1])
def test_two_ranks_write_the_bytes_that_one_process_writes(shard_size, single, tmp_path):
    ranks.run(checkpoint_ranks.copy, single, tmp_path / "pair", shard_size)
    assert contents(tmp_path / "pair") == contents(single)
    assert contents(tmp_path / "pair_later") == contents(single), "a copy is of the moment at which it was taken"
    assert_goes_on(tmp_path / "pair")


@pytest.mark.slow
def test_checkpoints_go_from_one_rank_to_two_to_four_and_back_in_any_form(single, tmp_path):
    ranks.run(checkpoint_ranks.copy, single, tmp_path / "pair", -1)
    source = tmp_path / "pair"
    for name, shard_size in (("hybrid", 2), ("full", -1), ("copies", 1)):
        ranks.run(checkpoint_ranks.copy, source, tmp_path / name, shard_size, world=4)
        source = tmp_path / name
        assert contents(source) == contents(single)
    assert_goes_on(source)


def test_ranks_that_stopped_take_the_next_step_to_the_bit(tmp_path):
    assert ranks.run(checkpoint_ranks.stop_and_go, tmp_path, -1) == [True, True]


@pytest.mark.slow
def test_ranks_in_two_dimensions_that_stopped_take_the_next_step_to_the_bit(tmp_path):
    assert ranks.run(checkpoint_ranks.stop_and_go, tmp_path, 2, world=4) == [True] * 4


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_holds_one_file_beside_its_shards_and_all_write_alike(world, tmp_path):
    layer, file_bytes = 64 * 64 * 4, 3 * 64 * 64 * 4
    for shard_size in {-1, world // 2}:
        folder = tmp_path / str(shard_size)
        found = ranks.run(checkpoint_ranks.measure_save, folder, shard_size, file_bytes, world=world)
        written = [bytes_written for _, bytes_written in found]
        assert sum(written) == 48 * layer + 7 * 65 * 4
        assert max(written) <= 1.2 * min(written)
        assert max(held for held, _ in found) <= file_bytes + layer


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_reads_its_own_rows_only(world, tmp_path):
    ranks.run(checkpoint_ranks.measure_save, tmp_path, -1, 50_000)
    found = ranks.run(checkpoint_ranks.measure_load, tmp_path, world=world)
    assert all(read == own for read, own in found)
    assert sum(own for _, own in found) == 48 * 64 * 64 + 7 * 65


def test_a_full_disk_of_one_rank_is_the_same_error_on_all(tmp_path):
    other, full = ranks.run(checkpoint_ranks.save_to_full_disk, tmp_path, 1)
    assert full == f"{tmp_path}/model-00002-of-00003.safetensors: I/O error: No space left on device"
    assert other == f"rank 1: {full}"
