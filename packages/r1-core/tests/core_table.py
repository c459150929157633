"""Writes the tables of estimators, losses, aggregations and KL penalties into the README, from code and docstrings.

python packages/r1-core/tests/core_table.py
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import r1_core
from r1_core.advantages import ESTIMATORS
from r1_core.kl import KL_ESTIMATORS
from r1_core.losses import AGGREGATIONS, POLICY_LOSSES
from r1_core.registry import Registry

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- tables: begin (written by tests/write_tables.py) -->", "<!-- tables: end -->"
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
TABLES: list[tuple[str, str, Registry[Any]]] = [
    ("Advantage estimators", "algorithm.adv_estimator", ESTIMATORS),
    ("Policy losses", "worker.actor.loss_type", POLICY_LOSSES),
    ("Aggregations", "worker.actor.loss_avg_mode", AGGREGATIONS),
    ("KL penalties", "algorithm.kl_penalty", KL_ESTIMATORS),
]


def tables() -> str:
    """The part of the README between the markers."""
    return "\n\n".join("\n".join(table(*entry)) for entry in TABLES)


def table(title: str, key: str, registry: Registry[Any]) -> Iterator[str]:
    yield f"**{title}** (`{key}`)\n"
    yield "| value | formula | paper (arXiv) | file |\n|---|---|---|---|"
    names: dict[Any, list[str]] = {}
    for name in registry:
        names.setdefault(registry.get(name), []).append(name)
    for entry, aliases in names.items():
        values = ", ".join(f"`{name}`" for name in aliases)
        yield f"| {values} | {formula(entry)} | {papers(entry, aliases[0])} | `{file(entry)}` |"


def formula(entry: Callable[..., Any]) -> str:
    """The first sentence of a docstring as far as a colon; an estimator's is the second paragraph of its module's.

    Raises ValueError, with the file's name, if that module's docstring has one paragraph only.
    """
    code = entry
    if code.__module__.startswith("r1_core.advantages."):
        _, blank, text = module_text(code).partition("\n\n")
        if not blank:
            raise ValueError(
                f"{inspect.getfile(entry)}: the module's docstring has one paragraph; the README's table takes the "
                "formula from a second one, after an empty line"
            )
    else:
        text = inspect.getdoc(code) or ""
    sentence = re.sub(r"\s*\([^()]*arXiv[^()]*\)", "", " ".join(text.split("\n\n")[0].split()))
    sentence = re.split(r"\.(?: |$)|: ", sentence)[0]
    return sentence.replace("|", r"\|")


def papers(entry: Callable[..., Any], name: str) -> str:
    """The arXiv ids that the module gives after this name, else those of the docstring, else those of the module."""
    code = entry
    spelled = name.replace("_", "[-_]")
    named = re.search(rf"^{spelled} \({ARXIV.pattern}", module_text(code), re.IGNORECASE | re.MULTILINE)
    if named:
        return named[1]
    found = ARXIV.findall(inspect.getdoc(code) or "") or ARXIV.findall(module_text(code))
    return ", ".join(dict.fromkeys(found)) or "see file"


def module_text(code: Callable[..., Any]) -> str:
    return inspect.getdoc(inspect.getmodule(code)) or ""


def file(entry: Callable[..., Any]) -> str:
    package = Path(r1_core.__file__).parent
    return Path(inspect.getfile(entry)).relative_to(package).as_posix()


def rewrite(readme: str) -> str:
    """Return the README with its tables as the code now has them. Raises ValueError if a marker is missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md lacks the markers {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def wrong_rows(readme: str) -> list[str]:
    """Rows of the README's tables that say what the code does not; one of a new file may still be missing."""
    right = tables().splitlines()
    return [line for line in readme.partition(BEGIN)[2].partition(END)[0].splitlines() if line and line not in right]


if __name__ == "__main__":
    README.write_text(rewrite(README.read_text(encoding="utf-8")), encoding="utf-8")
