"""Every architecture of the installed transformers does what the page of models says, and none is wrong in silence."""

import json
from importlib.util import find_spec
from typing import Any

import architectures
import pytest
from architectures import RECORD, Answer
from tiny_models import NAMES

KNOWN: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))


def test_a_family_that_an_upgrade_brings_is_named() -> None:
    assert sorted(set(NAMES) - set(KNOWN)) == [], "new: run tests/architectures.py --write, and read what it says"
    assert sorted(set(KNOWN) - set(NAMES)) == [], "gone from transformers"


def ask_again(names: list[str]) -> dict[str, tuple[Answer, Answer]]:
    with architectures.quiet():
        found = {name: architectures.ask(name) for name in names}
    return {name: (one, Answer(**KNOWN[name])) for name, one in found.items() if one != Answer(**KNOWN[name])}


def test_the_most_used_families_do_what_the_page_says() -> None:
    assert ask_again(["qwen3", "llama", "gemma2", "gpt_oss", "qwen2_5_vl", "qwen3_5_text", "bert"]) == {}


@pytest.mark.slow
def test_every_architecture_does_what_the_page_says() -> None:
    assert ask_again(NAMES) == {}


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_the_architectures_of_vllm_are_those_on_the_page() -> None:
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    assert vllm.__version__ == architectures.VLLM
    stored = json.loads(RECORD.with_name("architectures_vllm.json").read_text(encoding="utf-8"))
    assert sorted(ModelRegistry.get_supported_archs()) == stored
