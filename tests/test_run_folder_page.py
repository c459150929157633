"""The page about the run folder names every column of the record."""

from endtoend import ROOT

from r1_cli.runs.schema import COLUMNS


def test_the_page_has_a_line_for_each_column_of_the_record() -> None:
    page = (ROOT / "docs/run-folder.md").read_text()
    assert "\n".join(f"| `{column.name}` | {column.meaning} |" for column in COLUMNS) in page
