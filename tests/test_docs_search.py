"""The site, opened from a folder in headless Chromium: its search finds the right page first."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from endtoend import ROOT

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine"),
    pytest.mark.skipif(shutil.which("uv") is None, reason="there is no uv to build the site with"),
]
pytest.importorskip("playwright", reason="playwright is not installed")
BUILD = ("uv", "run", "--isolated", "--only-group", "docs", "mkdocs", "build", "--strict", "-q", "-f", ".ci/mkdocs.yml")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*BUILD, "-d", str(folder)], cwd=ROOT, env=environment, text=True, capture_output=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def page(site: Path) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True, viewport={"width": 1300, "height": 900}).new_page()
        page.goto((site / "index.html").as_uri())
        yield page
        browser.close()


def search(page: Any, words: str) -> list[str]:
    """The pages that the search lists, the best first.

    The site asks for results at each key that comes up. One key of the words is typed, after the last results are gone:
    so the next results are those of all words, however slow the machine is.
    """
    field, found = page.locator("input.md-search__input"), page.locator(".md-search-result__meta")
    field.click()
    field.fill("")
    field.press("Backspace")
    found.get_by_text("Type to start searching").wait_for(timeout=60_000)
    field.fill(words[:-1])
    field.press(words[-1])
    found.get_by_text("matching").wait_for(timeout=60_000)
    return [str(link) for link in page.locator(".md-search-result__link").evaluate_all("a => a.map(e => e.href)")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("worker.actor.optim.lr", "configuration.html"),
        ("rollout_batch_size", "configuration.html"),
        ("max_response_length", "configuration.html"),
        ("learning rate", "hyperparameters.html"),
        ("grpo", "algorithms/grpo.html"),
        ("gspo", "algorithms/gspo.html"),
        ("reward is zero", "my-run-does-not-learn.html"),
        ("out of memory", "out-of-memory.html"),
    ],
)
def test_the_search_of_a_site_opened_from_a_folder_brings_the_right_page_first(
    page: Any, words: str, expected: str
) -> None:
    found = search(page, words)
    assert f"/{expected}" in found[0], found[:3]


def test_pages_lead_on_and_keys_break_at_their_dots_only(page: Any, site: Path) -> None:
    page.goto((site / "configuration.html").as_uri())
    assert page.locator(".md-footer__link--next").count() == page.locator(".md-footer__link--prev").count() == 1
    broken = """keys => keys.map(key => {
        const range = document.createRange(), text = document.createTreeWalker(key, NodeFilter.SHOW_TEXT);
        for (let node = text.nextNode(); node; node = text.nextNode())
            for (const word of node.data.matchAll(/[A-Za-z0-9]+/g)) {
                range.setStart(node, word.index);
                range.setEnd(node, word.index + word[0].length);
                const lines = [...range.getClientRects()].filter(one => one.width > 0).map(one => Math.round(one.top));
                if (new Set(lines).size > 1) return key.innerText;
            }
    }).filter(Boolean)"""
    page.set_viewport_size({"width": 390, "height": 844})
    for name in ("configuration", "metrics", "adapters", "hyperparameters", "my-run-does-not-learn", "papers"):
        page.goto((site / f"{name}.html").as_uri())
        assert page.locator(".md-content :not(pre) > code").evaluate_all(broken) == [], name


def test_the_home_page_shows_a_run_and_the_version_and_formulas_are_typeset(page: Any, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    assert page.locator(".md-content img").evaluate_all("all => all.every(one => one.naturalWidth > 300)")
    assert page.locator(".grid.cards a").count() >= 9
    assert page.locator(".md-copyright").inner_text().startswith("r1 0.")
    page.goto((site / "algorithms/gae.html").as_uri())
    assert page.locator("math").evaluate_all("all => all.map(one => one.getBoundingClientRect().height > 10)") == [True]
