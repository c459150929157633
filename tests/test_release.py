"""A release has one version, a changelog entry, and a container without needless files."""

from pathlib import Path

import pytest
from endtoend import ROOT
from version import find_wrong


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of what names versions."""
    for file in [ROOT / "pyproject.toml", *ROOT.glob("packages/*/pyproject.toml"), ROOT / "CHANGELOG.md"]:
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    return tmp_path


def test_a_tag_must_be_the_version_of_every_package_and_be_told_of(house: Path) -> None:
    wrong = find_wrong("v9.9.9", house)
    assert any(line.startswith("packages/r1-core/pyproject.toml: r1-core is") for line in wrong)
    assert len(wrong) == 1 + 1 + len([*house.glob("packages/*/pyproject.toml")])
    for file in house.rglob("pyproject.toml"):
        file.write_text(file.read_text().replace('version = "0.1.0"', 'version = "9.9.9"', 1))
    assert find_wrong("v9.9.9", house) == ['CHANGELOG.md: no section "## 9.9.9 (date)"']
    changelog = house / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## Unreleased", "## Unreleased\n\n## 9.9.9 (2026-12-01)"))
    assert find_wrong("v9.9.9", house) == []


def test_all_packages_have_one_version() -> None:
    assert not [line for line in find_wrong("v0.1.0") if "pyproject" in line]


def test_what_the_container_copies_is_there() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[2:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
