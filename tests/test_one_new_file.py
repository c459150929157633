"""One new file is enough: tested in a copy of the repository with the file added and nothing else changed."""

from pathlib import Path

import pytest
from one_new_file import copy_repository


def test_a_copy_imports_itself_and_takes_only_new_files(tmp_path: Path) -> None:
    copy = copy_repository(tmp_path)
    copy.add("packages/r1-core/src/r1_core/losses/mine.py", '"""A room of its own."""\n\nVALUE = 7\n')
    printed = copy.run("import r1_core.losses.mine as mine; print(mine.VALUE, mine.__file__)")
    assert printed.split() == ["7", str(copy.root / "packages/r1-core/src/r1_core/losses/mine.py")]
    with pytest.raises(FileExistsError):
        copy.add("packages/r1-core/src/r1_core/losses/ppo.py", "")
    assert "Usage" in copy.r1("--help")
    assert "1 passed" in copy.pytest("tests/test_layering.py", "-k", "says_what_its_room_is_for and r1_core")
