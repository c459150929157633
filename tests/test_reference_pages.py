"""The generated pages are up to date and complete, and explain every entry."""

import inspect
import re
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module

import pytest
from reference_pages import ALGORITHMS, ROOT, SECTIONS, follows_actor, page_name
from test_layering import PUBLIC
from write_tables import stale_pages

from r1_cli.config.root import RunConfig
from r1_cli.config.schema import schema
from r1_cli.config.section import lookup
from r1_core import registry
from r1_rewards.spec import SERVICES
from r1_rewards.verifiers import BUILTINS

ROW = re.compile(r"^\| `([\w.]+)` \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
ENTRIES = [(key, one) for key, entries, _ in ALGORITHMS.values() for one in dict.fromkeys(entries().values())]


@cache
def documented_metrics() -> set[str]:
    """Return the names that docs/metrics.md has, those in braces one by one."""
    found = set[str]()
    for name in re.findall(r"`([^`]+)`", (ROOT / "docs/metrics.md").read_text()):
        head, _, inner = name.partition("{")
        inner, _, tail = inner.partition("}")
        found |= {f"{head}{one}{tail}" for one in inner.split(",")}
    return found


def test_the_pages_are_as_the_code_has_them() -> None:
    assert not stale_pages().keys(), "run python tests/write_tables.py"


def test_every_key_has_a_row_with_its_type_its_default_and_a_meaning() -> None:
    page = (ROOT / "docs/configuration.md").read_text()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    rows = {f"{name}.{row[0]}": row for name, part in sections.items() for row in ROW.findall(part)}
    keys = [*schema().values, *schema().open_mappings]
    assert len(keys) > 200
    assert not [key for key in keys if key not in rows and not follows_actor(key, lookup(RunConfig(), key))]
    assert len(rows) == len(re.findall(r"^\| `", page, re.MULTILINE)), "a cell is empty, or a bar not escaped"
    assert rows["algorithm.kl_coef"][1:3] == ("float ≥ 0", "`0.01`")
    assert rows["trainer.val_freq"][1:3] == ("int ≥ -1", "`5`")
    assert rows["data.sources[].weight"][1] == "float > 0 or null"
    assert rows["worker.hybrid_engine"][3].startswith("no effect")


@pytest.mark.parametrize(("key", "entry"), ENTRIES, ids=lambda one: getattr(one, "names", [one])[0])
def test_an_algorithms_page_says_what_it_is_when_to_use_it_and_its_settings(key: str, entry: registry.Entry) -> None:
    page = (ROOT / f"docs/algorithms/{page_name(key, entry)}.md").read_text()
    assert f"`{key}={entry.names[0]}`" in page
    assert re.search(r"\n```math\n.+\n```\n", page), "its class has no `formula`"
    for title, start in SECTIONS.items():
        assert page.count(f"\n## {title}\n\n{start}") == 1, f"its docstring has a paragraph that begins `{start}`"
    metrics = re.findall(r"`(\w+(?:/[\w@]+)+)`", page.split("\n## Metrics to watch\n")[1].split("\n## ")[0])
    code = (ROOT / re.findall(r"Code: \[`(.+)`\]", page)[0]).read_text()
    assert len(metrics) >= 2
    for metric in metrics:
        assert metric in documented_metrics() or f'"{metric.removeprefix("actor/")}":' in code, metric
    assert ROW.findall(page) or not entry.settings


def test_every_built_in_reward_has_a_section() -> None:
    page = (ROOT / "docs/rewards.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == [*BUILTINS, *SERVICES]


@pytest.mark.parametrize("package", PUBLIC)
def test_the_api_reference_explains_every_public_name_with_its_parameters(package: str) -> None:
    module = import_module(package)
    page = (ROOT / f"docs/api/{package.replace('_', '-')}.md").read_text()
    sections = {part.partition("\n")[0]: part for part in page.split("\n## ")[1:]}
    for name in PUBLIC[package].split():
        value = getattr(module, name)
        if inspect.ismodule(value):
            continue
        words = re.sub(r"^(A class of|A function of|`).*$", "", sections[name], flags=re.MULTILINE).split()
        assert len(words) > 5, f"{package}.{name} has no docstring or comment"
        if inspect.isfunction(value):
            call = re.search(r"^`(.+)`$", sections[name], re.MULTILINE)
            assert call
            for parameter in inspect.signature(value).parameters:
                assert re.search(rf"[(, *]{parameter}[:,=)]", call[1]), (name, parameter)
        elif is_dataclass(value):
            fields = {one for one in value.__dataclass_fields__ if not one.startswith("_")}
            assert fields <= {*re.findall(r"^\| `(\w+)` \|", sections[name], re.MULTILINE)}, name
