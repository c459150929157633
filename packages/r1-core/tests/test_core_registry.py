"""What a file of an estimator or a loss may write, and what is said of one that cannot be read."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest

from r1_core import registry
from r1_core.registry import Entry, Setting
from r1_core.settings import NonNegative, Positive, Range, Share, check_settings, fault

GOOD = '''"""A loss of this test: its first line.

More of it.
"""

import math

Kind = Literal["a", "b"]

class Helper:
    size: int

class Mine(PolicyLoss):
    """Its formula."""

    names = ("mine", "my_own")
    needs = ["old_logprobs"]
    aggregation = "seq"
    cached: ClassVar[int] = 3

    width: Positive = 0.5  # of the band
    most: float = math.inf
    least: NonNegative | None = None
    kind: Kind = "a"
    pair: tuple[float, float] | None = (-1.0, 1.0)
    many: tuple[str, ...] = ()
'''


def read(folder: Path, text: str) -> list[Entry]:
    (folder / "mine.py").write_text(text)
    return list(registry._read(folder / "mine.py", "pack.mine"))


def test_a_class_is_read_with_all_that_it_says(tmp_path):
    (entry,) = read(tmp_path, GOOD)
    assert entry == Entry(
        ("mine", "my_own"), "pack.mine:Mine", ("old_logprobs",), False, "seq",
        (
            Setting("width", Positive, 0.5, "of the band"),
            Setting("most", float, math.inf, ""),
            Setting("least", Optional[NonNegative], None, ""),  # noqa: UP045 (a value, as the registry gives it)
            Setting("kind", Literal["a", "b"], "a", ""),
            Setting("pair", Optional[tuple[float, float]], (-1.0, 1.0), ""),  # noqa: UP045
            Setting("many", tuple[str, ...], (), ""),
        ),
        "A loss of this test: its first line.",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('("mine", "my_own")', '"mine"', r"mine.py:Mine: names is 'mine'; write a tuple such as \('mine',\)"),
        ('("mine", "my_own")', '("my-own",)', "names is"),
        ('["old_logprobs"]', '("groop",)', r"mine.py:Mine needs 'groop', .*; did you mean 'groups'"),
        (" = 0.5", "", r"mine.py:21: the setting 'width' has no default"),
        (
            "Positive",
            "Tensor",
            r"mine.py:21: Tensor is no type of a setting; there are bool, .*Positive.*, and \| None",
        ),
        ("0.5", "compute()", r"mine.py:21: compute\(\) must be written out as a literal"),
    ],
)
def test_what_cannot_be_read_is_named_with_file_and_line(tmp_path, old, new, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, GOOD.replace(old, new, 1))


def test_two_files_of_one_name_are_refused(tmp_path, monkeypatch):
    (tmp_path / "losses").mkdir()
    monkeypatch.setattr(registry, "PACKAGE", tmp_path)
    for name in ("one", "two"):
        (tmp_path / "losses" / f"{name}.py").write_text(GOOD)
    with pytest.raises(ValueError, match=r"r1_core.losses.two:Mine and r1_core.losses.one:Mine are both named 'mine'"):
        registry._scan("losses")


@pytest.mark.parametrize(
    ("kind", "value", "found"),
    [
        (Positive, 0, "must be more than 0"),
        (Positive, 1e-9, None),
        (Share, 1.5, "must be at most 1"),
        (Share | None, None, None),
        (NonNegative, math.nan, "must be a number"),
        (NonNegative, math.inf, None),
        (Annotated[float, Range(below=1)], 1, "must be below 1"),
        (Literal["a", "b"], "c", "must be one of a, b"),
        (float, -1e300, None),
        (bool, True, None),
    ],
)
def test_a_range_names_what_a_value_must_be(kind: Any, value: Any, found: str | None):
    assert fault(kind, value) == found


def test_every_estimator_and_loss_holds_its_settings_to_their_ranges():
    for entry in {*registry.estimators().values(), *registry.losses().values()}:
        assert entry.help
        for setting in entry.settings:
            for wrong in (-1.0, 0.0, 1.0, math.nan, "no such word"):
                if fault(setting.type, wrong):
                    with pytest.raises(ValueError, match=f"{setting.name} is {wrong}; it must"):
                        entry.load()(**{setting.name: wrong})
        check_settings(entry.load()())
