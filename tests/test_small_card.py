"""The examples for small GPUs: a dry run accepts them, and every phase fits by its estimate."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from endtoend import R1, ROOT, read_log
from PIL import Image
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from r1_cli.config import load_config
from r1_cli.plan.disk import size_text
from r1_cli.plan.memory import estimate
from r1_cli.plan.phases import find_phases, find_remedies

FOLDER = ROOT / "examples/small_card"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# Hidden size, layers, heads, key heads, width, whether the head is the embedding; the vocabulary is 151,936 or 152,064.
TEXT = {
    "1.5B": (1536, 28, 12, 2, 8960, True),
    "3B": (2048, 36, 16, 2, 11008, True),
    "7B": (3584, 28, 28, 4, 18944, False),
}
MODELS = {
    "Qwen2.5-1.5B-Instruct": ("text", "1.5B"),
    "Qwen2.5-3B-Instruct": ("text", "3B"),
    "Qwen2.5-7B-Instruct": ("text", "7B"),
    "Qwen2-VL-2B-Instruct": ("qwen2_vl", "1.5B"),
    "Qwen2.5-VL-3B-Instruct": ("qwen2_5_vl", "3B"),
    "Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl", "7B"),
}


def write_header(name: str, folder: Path) -> None:
    """A model's configuration and the names and shapes of its tensors, without values."""
    kind, size = MODELS[name]
    hidden, layers, heads, keys, width, tied = TEXT[size]
    text = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys,
        "intermediate_size": width, "vocab_size": 151936 if tied else 152064, "tie_word_embeddings": tied,
    }  # fmt: skip
    config: Any = Qwen2Config(**text)
    family: Any = Qwen2ForCausalLM
    if kind == "qwen2_vl":
        config, family = Qwen2VLConfig(text_config=text, vision_config={"hidden_size": hidden}), None
        config.tie_word_embeddings, family = tied, Qwen2VLForConditionalGeneration
    elif kind == "qwen2_5_vl":
        tower = {"hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": hidden}
        config, family = Qwen2_5_VLConfig(text_config=text, vision_config=tower), Qwen2_5_VLForConditionalGeneration
        config.tie_word_embeddings = tied
    with torch.device("meta"):
        model = family(config)
    entries = {
        key: {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [0, 0]}
        for key, tensor in model.named_parameters()
        if not (tied and key == "lm_head.weight")
    }
    header = json.dumps(entries).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (folder / "config.json").write_text(json.dumps({"text_config": text}))


def arithmetic(name: str, folder: Path) -> tuple[Any, list[Any], int]:
    """The configuration with its model's sizes, its phases, and the card's bytes."""
    path = FOLDER / f"{name}.yaml"
    card = int(name.partition("_")[2].removesuffix("gb")) << 30
    model = yaml.safe_load(path.read_text())["worker"]["actor"]["model"]["model_path"]
    write_header(model.partition("/")[2], folder)
    config, _ = load_config([str(path), f"worker.actor.model.model_path={folder}", "worker.rollout.name=vllm"])
    memory = estimate(config)
    assert memory is not None
    return config, find_phases(config, memory, card), card


def row(name: str, phases: list[Any]) -> str:
    return f"| `{name}.yaml` | {' | '.join(size_text(phase.total) for phase in phases)} |"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_phase_of_a_step_fits_into_the_card_as_its_page_says(name: str, tmp_path: Path) -> None:
    config, phases, card = arithmetic(name, tmp_path)
    for phase in phases:
        assert phase.total <= card, (phase.name, {part: size_text(size) for part, size in phase.parts.items()})
    assert find_remedies(config, card) == []
    assert row(name, phases) in (FOLDER / "README.md").read_text()


TINY = [
    "data.rollout_batch_size=2", "worker.actor.global_batch_size=2", "worker.rollout.n=2", "data.max_prompt_length=200",
    "data.max_response_length=8", "worker.actor.model.model_path=examples/quickstart/model", "trainer.max_steps=1",
    "worker.rollout.name=embedded", "trainer.save_freq=-1", "data.filter_overlong_prompts_workers=1",
]  # fmt: skip


def write_rows(name: str, folder: Path) -> Path:
    """Rows with the columns of the example's data set."""
    rows: list[dict[str, Any]] = [{"question": f"What is {n} + 1?", "answer": f"#### {n + 1}"} for n in range(4)]
    if name.startswith("pictures"):
        Image.new("RGB", (56, 56), "red").save(folder / "red.png")
        rows = [{"problem": f"<image> {n}?", "answer": str(n), "images": ["red.png"]} for n in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "rows.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_its_keys_train_a_tiny_model_on_rows_of_its_form(name: str, r1: R1, tmp_path: Path) -> None:
    said = r1(
        "train", str(FOLDER / f"{name}.yaml"), f"data.train_files={write_rows(name, tmp_path)}", *TINY,
        f"data.image_dir={tmp_path}", f"trainer.save_checkpoint_path={tmp_path / 'run'}",
    )  # fmt: skip
    trained = 385_024 if "48gb" in name else 192_512  # factors of rank 64, and of rank 32
    assert f"{trained:,} of {866_464 + trained:,} weights are trained" in said.output
    assert "one copy of it is in memory" in said.output
    (record,) = read_log(tmp_path / "run")
    assert record["rollout/canary_gap"] < 2e-5
    assert record["actor/kl_loss"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_dry_run_accepts_it(name: str, r1: R1) -> None:
    result = r1("train", str(FOLDER / f"{name}.yaml"), "--dry-run")
    assert result.exit_code == 0, result.output
