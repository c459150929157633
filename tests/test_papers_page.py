"""docs/papers.md has every paper of r1-core's estimators and losses, and settings that a configuration accepts."""

import re

import pytest
from endtoend import QUICKSTART, ROOT

from r1_cli.config import load_config
from r1_core import registry

PAGE = (ROOT / "docs/papers.md").read_text(encoding="utf-8")
SETTINGS = re.findall(r"`([a-z_]+\.[\w.]+=[^`]+)`", PAGE)
ARXIV = re.compile(r"arXiv (\d{4}\.\d{5})")
FILES = sorted({entry.where.partition(":")[0] for entry in {**registry.estimators(), **registry.losses()}.values()})


@pytest.mark.parametrize("module", FILES)
def test_the_papers_of_an_estimator_or_a_loss_are_on_the_page(module: str) -> None:
    text = (ROOT / "packages/r1-core/src" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    papers = set(ARXIV.findall(text))
    assert papers
    assert not [paper for paper in papers if paper not in PAGE]


@pytest.mark.parametrize("setting", sorted(set(SETTINGS)))
def test_a_setting_of_the_page_is_accepted(setting: str) -> None:
    more = ["data.max_length=512", "algorithm.disable_kl=false"] if setting.startswith("sft.") else []
    load_config([QUICKSTART, setting, *more], command=None)
