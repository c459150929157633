"""Every architecture of the installed transformers does what the page of models says, and none is wrong in silence."""

import json
import re
from importlib.util import find_spec
from typing import Any

import architectures
import pytest
from architectures import RECORD, Answer
from tiny_models import NAMES

from r1_cli.build.refusals import explain_refusal

KNOWN: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))


def test_a_family_that_an_upgrade_brings_is_named() -> None:
    assert sorted(set(NAMES) - set(KNOWN)) == [], "new: run tests/architectures.py --write, and read what it says"
    assert sorted(set(KNOWN) - set(NAMES)) == [], "gone from transformers"


def ask_again(names: list[str]) -> dict[str, tuple[Answer, Answer]]:
    with architectures.quiet():
        found = {name: architectures.ask(name) for name in names}
    return {name: (one, Answer(**KNOWN[name])) for name, one in found.items() if one != Answer(**KNOWN[name])}


# And some whose forward is unlike that of others: states alone, all logits returned, logits changed by indices, …
USED = "qwen3 llama gemma2 gpt_oss qwen2_5_vl qwen3_5_text gemma3n_text llama4_text bert"
UNLIKE = "mamba2 jamba minimax qwen2_5_omni_thinker chameleon biogpt blt prophetnet"


def test_the_most_used_families_do_what_the_page_says() -> None:
    assert ask_again([*USED.split(), *UNLIKE.split()]) == {}


def test_every_refusal_is_a_sentence_that_names_family_and_reason_and_what_works_instead() -> None:
    refused = {name: Answer(**one) for name, one in KNOWN.items()}
    for name, one in refused.items():
        assert "\n" not in one.why + one.refusal, name
        assert not one.layout or one.engine == (one.refusal == ""), name
        if not one.layout and not one.why.startswith("not tried: "):
            sentence = f"r1 cannot train {re.escape(name)}: .+; train .+ \\(docs/models.md lists all\\)"
            assert re.fullmatch(sentence, explain_refusal(name, one.why)), name
        if one.layout and not one.engine:
            sentence = r"the embedded engine (cannot sample|would sample wrongly) from \w+ \(.+\), vLLM may( know it)?"
            assert re.fullmatch(sentence, one.refusal), one.refusal


def test_a_model_that_needs_a_picture_with_every_row_is_told_from_one_that_fails() -> None:
    blip = (
        "cannot be computed and differentiated (Blip.forward() missing 1 required positional argument: 'pixel_values')"
    )
    assert explain_refusal("blip", blip).startswith(
        "r1 cannot train blip: its forward needs more than the tokens of a row (Blip.forward() missing 1 required"
    )
    fails = "cannot be computed (KeyError: 1)"
    assert "its own forward fails on a row of text (KeyError: 1); train" in explain_refusal("one", fails)
    other = "with its own eager attention, too, it has other log-probs in a padded batch; train another"
    assert other in explain_refusal("one", "has other log-probs in a padded batch")


@pytest.mark.slow
def test_every_other_architecture_does_what_the_page_says() -> None:
    assert ask_again(sorted({*NAMES} - {*USED.split(), *UNLIKE.split()})) == {}


@pytest.mark.vllm
@pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed")
def test_the_architectures_of_vllm_are_those_on_the_page() -> None:
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    assert vllm.__version__ == architectures.VLLM
    stored = json.loads(RECORD.with_name("architectures_vllm.json").read_text(encoding="utf-8"))
    assert sorted(ModelRegistry.get_supported_archs()) == stored
