"""Fail unless the page that `r1 view` serves is what its sources build to.

Skipped, and said so, where Node is not installed or the registry of its packages cannot be asked.
"""

import filecmp
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ROOT / "packages/r1-cli/view"
BUILT = ROOT / "packages/r1-cli/src/r1_cli/runs/view/static"
LOCK = "package-lock.json"
MOST_BYTES = 300_000


def run(*command: str, folder: Path) -> None:
    subprocess.run(command, check=True, cwd=folder)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def main() -> None:
    size = sum((BUILT / name).stat().st_size for name in files(BUILT))
    if size > MOST_BYTES:
        sys.exit(f"{BUILT}: {size} bytes, more than {MOST_BYTES}")
    if '"resolved"' in (SOURCES / LOCK).read_text():
        sys.exit(f"{LOCK} names where packages are from: npm install with omit-lockfile-registry-resolved")
    if shutil.which("npm") is None:
        print("the page's build is not checked: there is no npm")
        return
    if subprocess.run(["npm", "ping", "--fetch-retries=0", "--fetch-timeout=20000"], capture_output=True).returncode:
        print("the page's build is not checked: npm's registry does not answer")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "view"
        shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("node_modules"))
        # Refuses a lock that is not that of package.json.
        run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", folder=folder)
        run("npm", "run", "check", folder=folder)
        run("npm", "run", "build", "--", "--outDir", "built", folder=folder)
        there, here = files(folder / "built"), files(BUILT)
        _, other, unread = filecmp.cmpfiles(folder / "built", BUILT, there & here, shallow=False)
        if wrong := sorted({*(there ^ here), *other, *unread}):
            sys.exit(f"{BUILT} is not what its sources build to ({', '.join(wrong)}): npm run build in {SOURCES}")
    print(f"the page is its sources' build: {size} bytes")


if __name__ == "__main__":
    main()
