"""The scan for secrets finds each kind, names its line, and allows planted ones."""

import pytest
from secret_scan import KINDS, find_secrets

EXAMPLES = {
    "a private key": "-----BEGIN " + "RSA PRIVATE KEY-----",
    "a key of AWS": "AKIA" + "Q" * 16,
    "a token of GitHub": "ghp_" + "a1" * 18,
    "a token of GitLab": "glpat-" + "a1" * 10,
    "a token of Hugging Face": "hf_" + "Ab" * 17,
    "a key of an API": "sk-proj-" + "a1" * 20,
    "a key of Google": "AIza" + "a" * 35,
    "a token of Slack": "xoxb-" + "1" * 24,
    "a token of PyPI": "pypi-" + "Ag" * 40,
    "a signed web token": ".".join(("eyJ" + "a" * 20, "eyJ" + "b" * 20, "c" * 43)),
    "a key of wandb": "WANDB_API_KEY=" + "0a" * 20,
    "a URL with a password": "https://me:" + "hunter22@example.org",
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_by_line_and_allowed_if_planted(kind: str) -> None:
    text = f"first\nkey: {EXAMPLES[kind]}\nlast"
    assert [*find_secrets(text.encode())] == [(2, kind)]
    assert not [*find_secrets(text.replace("key:", "planted:").encode())]
