"""Generate docs/suites.md from the suite files."""

from collections.abc import Iterator

from r1_cli.config.suites import Suite, load_suite, suite_names

PAGE = "docs/suites.md"
HEAD = """# Suites

Each suite is a file in `r1_cli/suites`. [Evaluation](evaluation.md) says what its parts mean, and how to write one."""
FIGURES = """
## Published figures

Figures of others, each with the prompt that its page names. r1 compares a result with the figures of the same prompt
only. A suite without a figure here has none whose page and prompt were read."""
ROWS = "a dash in the column of rows or revision: the number, or the commit, was read nowhere and is not checked"


def page(note: str) -> str:
    suites = {name: load_suite(name) for name in suite_names()}
    table = [
        "| suite | benchmark | rows | revision | digest | graded by | answers | prompts, the first by default |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(name, suite) for name, suite in suites.items()),
    ]
    sources = ["| prompt | from |", "|---|---|", *_prompts(suites)]
    figures = ["| suite and prompt | model | value | page |", "|---|---|---|---|", *_figures(suites)]
    parts = [HEAD, "", note, "", *table, "", f"Rows: {ROWS}.", "", "## Prompts", "", *sources, FIGURES, "", *figures]
    return "\n".join(parts) + "\n"


def _row(name: str, suite: Suite) -> str:
    rows = suite.rows
    count = f"{rows.count:,}" if rows.count else "–"
    options = "".join(f" {key}={value}" for key, value in suite.grader_options.items())
    prompts = ", ".join(f"`{prompt}`" for prompt in suite.prompts)
    cells = (
        f"`{name}`",
        f"[{suite.title}]({suite.page})" + (", gated" if rows.gated else ""),
        count,
        f"`{rows.revision[:7]}`" if rows.revision else "–",
        "checked" if rows.digest else "–",
        f"`{suite.grader}`{options}",
        str(suite.sample.n),
        prompts,
    )
    return f"| {' | '.join(cells)} |"


def _prompts(suites: dict[str, Suite]) -> Iterator[str]:
    for name, suite in suites.items():
        yield from (f"| `{name}/{key}` | {prompt.source} |" for key, prompt in suite.prompts.items())


def _figures(suites: dict[str, Suite]) -> Iterator[str]:
    for name, suite in suites.items():
        for one in suite.published:
            yield f"| `{name}/{one.prompt}` | {one.model} | {one.value:.3f} | {one.source} |"
