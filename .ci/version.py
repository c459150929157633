"""Check that a tag names the version of every package: python .ci/version.py v0.2.0."""

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def find_wrong(tag: str, root: Path = ROOT) -> list[str]:
    """Return what does not go with a tag: packages of another version, or a changelog that does not tell of it."""
    version = tag.removeprefix("v")
    wrong = []
    for file in [root / "pyproject.toml", *sorted(root.glob("packages/*/pyproject.toml"))]:
        project = tomllib.loads(file.read_text())["project"]
        if project["version"] != version:
            wrong.append(f"{file.relative_to(root)}: {project['name']} is {project['version']}, the tag says {version}")
    if f"\n## {version} " not in (root / "CHANGELOG.md").read_text():
        wrong.append(f'CHANGELOG.md: no section "## {version} (date)"')
    return wrong


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    if found := find_wrong(sys.argv[1]):
        sys.exit("\n".join(found))
