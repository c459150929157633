"""Rows of reasoning-gym: the source's spelling, the same rows for the same arguments, and what is refused."""

import pickle
from importlib.util import find_spec

import pytest

from r1_data import DataError, RowReader, count_rows, name_source, read_rows, read_sources
from r1_data.tables import gym
from r1_data.tables.gym import GymTask, parse_task

installed = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="needs r1-data[gym]")


@pytest.fixture
def is_installed(monkeypatch):
    """As if reasoning-gym were there: it is not imported before rows are read."""
    monkeypatch.setattr(gym, "find_spec", lambda name: True)


@pytest.mark.parametrize(
    ("spec", "task"),
    [
        ("reasoning_gym:maze", GymTask("maze", {"size": 500, "seed": 0})),
        ("reasoning_gym:maze:size=9:seed=2", GymTask("maze", {"size": 9, "seed": 2})),
        (
            'reasoning_gym:a_b:words=["x","y"]:mode=fast:share=0.5',
            GymTask("a_b", {"size": 500, "seed": 0, "words": ["x", "y"], "mode": "fast", "share": 0.5}),
        ),
        ('reasoning_gym:a:parts={"b":1}', GymTask("a", {"size": 500, "seed": 0, "parts": {"b": 1}})),
    ],
)
def test_a_task_is_written_with_its_arguments(is_installed, spec, task):
    assert parse_task(spec) == task


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:", "write reasoning_gym:TASK"),
        ("reasoning_gym:a b", "write reasoning_gym:TASK"),
        ("reasoning_gym:maze:9", "write reasoning_gym:TASK"),
        ("reasoning_gym:maze:size=0", "size must be a whole number of at least 1, found 0"),
        ("reasoning_gym:maze:size=true", "size must be a whole number of at least 1, found True"),
        ("reasoning_gym:maze:seed=x", "seed must be a whole number of at least 0, found 'x'"),
    ],
)
def test_another_spelling_is_refused(is_installed, spec, message):
    with pytest.raises(DataError, match=message):
        count_rows(spec)


def test_rows_are_counted_without_making_them_and_slices_count(is_installed):
    assert count_rows(["reasoning_gym:maze", "reasoning_gym:maze:seed=1:size=20[:5]"]) == 505
    assert count_rows("reasoning_gym:maze:size=10:weights=[1,2]") == 10


def test_the_package_to_install_is_named(monkeypatch):
    monkeypatch.setattr(gym, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'r1-data\[gym\]'"):
        count_rows("reasoning_gym:maze")


def test_a_source_is_named_after_its_task():
    assert name_source("reasoning_gym:leg_counting:size=9:seed=1[:4]") == "leg_counting"


@installed
def test_rows_depend_on_their_number_and_the_arguments_alone():
    rows = read_rows("reasoning_gym:leg_counting:size=4:seed=7")
    again = pickle.loads(pickle.dumps(rows))
    assert [row_id for row_id, _ in rows] == [f"leg_counting:{number}" for number in (1, 2, 3, 4)]
    assert again[2] == rows[2]
    [(_, more)] = read_rows("reasoning_gym:leg_counting:size=9:seed=7[2:3]")
    assert more["question"] == rows[2][1]["question"]  # however many rows there are
    assert rows[2][1]["question"] != read_rows("reasoning_gym:leg_counting:seed=8")[2][1]["question"]


@installed
def test_a_row_is_read_without_naming_its_columns_and_says_where_it_is_from():
    row_id, row = read_rows("reasoning_gym:leg_counting:size=4:seed=7:max_animals=5")[1]
    example = RowReader(source="legs")(row_id, row)
    assert "legs" in example.messages[0]["content"]
    assert int(example.ground_truth) > 0
    origin = {"task": "leg_counting", "arguments": {"size": 4, "seed": 7, "max_animals": 5}, "index": 1}
    assert example.metadata == {"reasoning_gym": origin, "data_source": "legs"}


@installed
def test_a_task_that_shows_no_answer_has_an_empty_one():
    assert read_rows("reasoning_gym:graph_color:size=1")[0][1]["answer"] == ""


@installed
def test_two_sources_of_one_task_have_row_ids_of_their_own():
    first, second = read_sources(["reasoning_gym:maze:size=2", "reasoning_gym:maze:size=2:seed=1"])
    assert (first[0][0], second[0][0]) == ("reasoning_gym:maze:size=2:1", "reasoning_gym:maze:size=2:seed=1:1")


@installed
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("reasoning_gym:leg_count", "there is no such task; did you mean leg_counting"),
        ("reasoning_gym:maze:legs=4", "reasoning_gym:maze cannot be made with .*unexpected keyword argument 'legs'"),
        ("reasoning_gym:maze:min_grid_size=0", "reasoning_gym:maze cannot be made with"),
    ],
)
def test_unknown_tasks_and_arguments_are_refused_by_name(spec, message):
    with pytest.raises(DataError, match=message):
        read_rows(spec)
