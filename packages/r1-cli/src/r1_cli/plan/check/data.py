"""Checks of the rows, some of each source, as `r1 data check` looks at all."""

from collections.abc import Iterable, Iterator

from r1_cli.plan.check.findings import Finding, Subject
from r1_cli.plan.data_check.findings import TITLES
from r1_cli.train.roles import Item

ROWS = 64  # of each source, spread evenly
FIXES = {
    "overlong": "raise data.max_prompt_length, or lower data.max_pixels",
    "media": "correct the paths, data.image_dir or data.image_key",
    "markers": "write as many <image> or <video> markers as there are media",
    "missing column": "name the columns with data.prompt_key and data.answer_key",
    "leak": "take these rows out of one of the two files",
    "reward": "choose the reward that reads these ground truths, or correct them",
}


def _quietly(items: Iterable[Item], what: str, total: int) -> Iterator[Item]:
    yield from items


def check_rows(subject: Subject) -> Iterator[Finding]:
    """Read, render and compare rows, and ask the rewards whether they credit the truths."""
    from r1_cli.build.rendering import build_renderer
    from r1_cli.plan.data_check.examine import check
    from r1_data.check import Inspector

    renderer = build_renderer(subject.config, subject.model)
    inspector = Inspector(renderer, subject.config.data.max_prompt_length)
    report = check(subject.config, inspector, None, _quietly, most=ROWS)
    for found in report.ordered():
        told = f"{found.count} × {TITLES.get(found.kind, found.kind)}"
        first = found.examples[0][0] if found.examples else ""
        fix = FIXES.get(found.kind, "r1 data check names every such row")
        yield Finding(f"data.{found.kind}", found.level, f"{told}: {first}", fix)
