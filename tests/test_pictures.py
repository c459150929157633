"""The picture of the terminal: of what was printed, its beginning and its end, and nothing from a network."""

import importlib.util
import re

from endtoend import ROOT

spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs/pictures.py")
assert spec is not None
assert spec.loader is not None
pictures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pictures)


def words(picture: str) -> str:
    """The text of an SVG of a terminal, without spaces, a line each."""
    rows: dict[str, str] = {}
    for top, text in re.findall(r' y="([\d.]+)" textLength[^>]*>([^<]*)</text>', picture):
        rows[top] = rows.get(top, "") + text.replace("&#160;", "").strip()
    return "\n".join(rows.values())


def test_a_picture_has_the_first_and_the_last_lines_and_loads_nothing() -> None:
    printed = "".join(f"step {number}/99 [1.5 s]\n" for number in range(99))
    picture = pictures.terminal(printed)
    command, *lines = words(picture).split("\n")
    assert command == "$" + pictures.COMMAND.replace(" ", "")
    steps = [*range(pictures.HEAD), None, *range(99 - pictures.TAIL, 99)]
    assert lines == ["…" if number is None else f"step{number}/99[1.5s]" for number in steps]
    assert not re.search(r"@font-face|@import|url\(\W*http|href=", picture)


def test_the_picture_of_the_readme_is_of_a_command_of_its_own() -> None:
    readme = (ROOT / "README.md").read_text()
    (name,) = re.findall(r"!\[[^]]+\]\((docs/\w+\.svg)\)", readme)
    command, *lines = words((ROOT / name).read_text(encoding="utf-8")).split("\n")
    assert command.startswith("$" + pictures.COMMAND.replace(" ", ""))
    assert f"\n    {pictures.COMMAND}\n" in readme
    assert len(lines) >= 12
