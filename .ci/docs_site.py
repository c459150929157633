"""Hooks of the site: its navigation is docs/index.md, and what pages link to outside docs/ becomes part of it.

Every link stays as it is written, so that pages read the same in the repository and on the site.
"""

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BESIDE = "repository"  # the folder of the site for what lies outside docs/
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)#\s]+)((?:#[^)]*)?\))")
ITEM = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)", re.MULTILINE)
ASSETS = ("site.css", "iframe-worker.js")  # beside this file
BOOST = {
    "configuration.md": 8.0,
    "my-run-does-not-learn.md": 3.0,
    "troubleshooting.md": 2.0,
    "out-of-memory.md": 3.0,
}  # of these in the search
FURTHER = 0.3  # of what lies outside docs/ or in the API reference, which say the same at more length, and of variants
FORMULA = re.compile(r"^```math\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<=<code>)[^<>&\n]+(?=</code>)")  # one line of it, as in a sentence
ELSEWHERE = re.compile(
    r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?(?:https?:)?//[^\"'>\s]+", re.IGNORECASE
)


def navigation(index: Path) -> list[dict[str, Any]]:
    """Return the headings of an index page with the pages below each; another index brings the pages that it lists."""
    sections: list[dict[str, Any]] = [{"Home": "index.md"}]
    for section in index.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        sections.append(
            {title.strip(): [entry for item in ITEM.findall(text) for entry in _entry(index.parent, *item)]}
        )
    return sections


def _entry(folder: Path, title: str, target: str) -> Iterator[dict[str, Any]]:
    page = (folder / target).resolve()
    here = place(page)
    if page.name == "index.md":
        below = [{name: place((page.parent / link).resolve())} for name, link in ITEM.findall(page.read_text("utf-8"))]
        yield {title: [here, *below]}
    else:
        yield {title: here}


def place(target: Path) -> str:
    """Return where a file of the repository lies in the site's sources."""
    if target.is_relative_to(DOCS):
        return target.relative_to(DOCS).as_posix()
    return f"{BESIDE}/{target.relative_to(ROOT).as_posix()}" + ("/index.md" if target.is_dir() else "")


def links(page: Path) -> Iterator[Path]:
    """Yield the files and folders of the repository that a page links to."""
    for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and (page.parent / target).exists():
            yield (page.parent / target).resolve()


def on_config(config: Any) -> Any:
    config.nav = navigation(DOCS / "index.md")
    version = tomllib.loads((ROOT / "packages/r1-cli/pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    config.copyright = f"r1 {version}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside docs/, and what those pages link to."""
    from mkdocs.structure.files import File, InclusionLevel

    for name in ASSETS:
        files.append(File.generated(config, f"assets/{name}", abs_src_path=str(Path(__file__).with_name(name))))
    waiting, known = sorted(DOCS.rglob("*.md")), set(DOCS.rglob("*"))
    while waiting:
        for target in links(waiting.pop()):
            if target in known:
                continue
            known.add(target)
            source = {"content": listing(target)} if target.is_dir() else {"abs_src_path": str(target)}
            added = File.generated(config, place(target), **source, inclusion=InclusionLevel.NOT_IN_NAV)
            if (present := files.get_file_from_path(added.src_uri)) is not None:
                files.remove(present)
            files.append(added)
            if target.suffix == ".md":
                waiting.append(target)
            elif target.is_dir():
                waiting += [path for path in target.iterdir() if path.name == "README.md"]
    return files


def listing(folder: Path) -> str:
    """Return the page of a folder that is linked as such: its own, or the names of its files."""
    own = folder / "README.md"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    return "\n".join([f"# {folder.relative_to(ROOT)}", "", *(f"- `{name}`" for name in names), ""])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to where those lie in the site."""
    source = page.file.src_uri
    # Of algorithms: variants, such as gspo_token.
    further = source.startswith((BESIDE, "api/")) or "_" in Path(source).name
    page.meta["search"] = {
        "boost": BOOST.get(source, FURTHER if further else 1.0),
        "exclude": source.startswith(f"{BESIDE}/benchmarks/"),  # measurements, not explanations
    }
    inside = source.removeprefix(f"{BESIDE}/")
    folder = (DOCS / source if inside == source else ROOT / inside).parent

    def moved(match: re.Match[str]) -> str:
        opening, target, closing = match.groups()
        path = (folder / target).resolve()
        if "://" in target or not path.is_relative_to(ROOT) or not path.exists():
            return match[0]
        return opening + os.path.relpath(place(path), os.path.dirname(source)) + closing

    return FORMULA.sub(typeset, LINK.sub(moved, markdown))


def typeset(block: re.Match[str]) -> str:
    """Turn LaTeX into MathML, which browsers show without a script."""
    from latex2mathml.converter import convert

    return f'<div class="formula">{convert(block[1], display="block")}</div>'


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let keys break at their dots and underscores; refuse a page that would load from a network."""
    found = [one[0] for one in ELSEWHERE.finditer(output) if 'rel="canonical"' not in one[0]]
    if found:
        raise ValueError(f"{page.file.src_uri} loads from a network: {found[0]}")
    return CODE.sub(lambda code: re.sub(r"([._=/])(?=\w)", r"\1<wbr>", code[0]), output)
