"""Find secrets in the files that git tracks, without a network: `uv run --no-project python .ci/secret_scan.py`.

A line that must look like a secret, as in a test, has the word `planted` in it.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "a private key": re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    "a key of AWS": re.compile(rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    "a token of GitHub": re.compile(rb"\b(?:gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60,})"),
    "a token of GitLab": re.compile(rb"\bglpat-[A-Za-z0-9_-]{20,}"),
    "a token of Hugging Face": re.compile(rb"\bhf_[A-Za-z0-9]{30,}"),
    "a key of an API": re.compile(rb"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}"),
    "a key of Google": re.compile(rb"\bAIza[A-Za-z0-9_-]{35}"),
    "a token of Slack": re.compile(rb"\bxox[abprs]-[A-Za-z0-9-]{20,}"),
    "a token of PyPI": re.compile(rb"\bpypi-[A-Za-z0-9_-]{50,}"),
    "a signed web token": re.compile(rb"\beyJ[A-Za-z0-9_-]{15,}\.eyJ[A-Za-z0-9_-]{15,}\.[A-Za-z0-9_-]{20,}"),
    "a key of wandb": re.compile(rb"(?i)wandb\w*key\W{1,4}[0-9a-f]{40}\b"),
    "a URL with a password": re.compile(rb"://[A-Za-z0-9._-]+:[A-Za-z0-9._~!$&*+-]{6,}@[A-Za-z0-9]"),
}
ALLOWED = b"planted"


def find_secrets(content: bytes) -> Iterator[tuple[int, str]]:
    """Yield the number of each line that holds a secret, and its kind; never the secret."""
    for kind, pattern in KINDS.items():
        for match in pattern.finditer(content):
            begin, end = content.rfind(b"\n", 0, match.start()) + 1, content.find(b"\n", match.end())
            if ALLOWED not in content[begin : end if end >= 0 else None]:
                yield content.count(b"\n", 0, match.start()) + 1, kind


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    found = 0
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if name and path.is_file() and not path.is_symlink():
            for line, kind in find_secrets(path.read_bytes()):
                print(f"{name}:{line}: {kind}")
                found += 1
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
