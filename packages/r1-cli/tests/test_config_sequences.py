"""Which sizes of `worker.actor.ulysses_size` a model can have: found in its configuration, before it is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf
from rich.console import Console

from r1_cli.config import ConfigError, RunConfig, load_config, without_effect
from r1_cli.config.actor import divide_heads
from r1_cli.config.root import require_shareable
from r1_cli.plan.announce import render
from r1_cli.plan.batches import make_plan

BASE = ["data.train_files=hub/rows@train", "worker.reward.reward_function=math"]


def config_of(size: int, *words: str, model: str = "org/model") -> RunConfig:
    model_path = f"worker.actor.model.model_path={model}"
    return load_config([*BASE, model_path, f"worker.actor.ulysses_size={size}", *words])[0]


def test_heads_are_dealt_out_evenly_and_each_with_its_key_head() -> None:
    assert [n for n in range(1, 29) if divide_heads(28, 4, n)] == [1, 2, 4, 28]  # Qwen2.5-7B
    assert [n for n in range(1, 33) if divide_heads(32, 8, n)] == [1, 2, 4, 8, 16, 32]
    assert [n for n in range(1, 13) if divide_heads(12, 1, n)] == [1, 2, 3, 4, 6, 12]
    assert not divide_heads(12, 3, 2)  # a rank's six heads would need one and a half key heads


@pytest.mark.parametrize("text_in", ["text_config", None])
def test_a_local_models_heads_are_looked_at_before_anything_is_loaded(text_in: str | None, tmp_path: Path) -> None:
    text = {"num_attention_heads": 28, "num_key_value_heads": 4, "model_type": "qwen2"}
    (tmp_path / "config.json").write_text(json.dumps({text_in: text} if text_in else text))
    with pytest.raises(ConfigError) as error:
        config_of(8, model=str(tmp_path))
    assert (
        "worker.actor.ulysses_size=8 (command line): must divide the 28 heads of attention, and divide its 4 key heads "
        "or be a multiple of them; on nodes of 8 devices 1 or 2 or 4 would do"
    ) in str(error.value)
    config_of(4, model=str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (hf.Qwen2Config(num_attention_heads=6, num_key_value_heads=3), "1 would do"),
        (hf.MistralConfig(sliding_window=64), "mistral has others (sliding_attention): set 1"),
        (hf.Gemma3TextConfig(), "gemma3_text has others (sliding_attention): set 1"),
        (hf.Qwen3_5TextConfig(), "qwen3_5_text has others (linear_attention): set 1"),
        (hf.MambaConfig(), "mamba has others (linear_attention): set 1"),
        (SimpleNamespace(model_type="odd"), "and odd names none: set 1"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_share_its_sequences_is_refused_by_name(text: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        require_shareable(config_of(2), text)
    assert "worker.actor.ulysses_size=2: " in str(error.value)
    assert message in str(error.value)
    require_shareable(config_of(1), text)


@pytest.mark.parametrize(
    "text",
    [hf.Qwen2Config(), hf.Qwen3Config(), hf.LlamaConfig(), hf.MistralConfig(sliding_window=None), hf.GPT2Config()],
)
def test_a_model_whose_layers_all_attend_to_all_tokens_is_not(text: Any) -> None:
    require_shareable(config_of(2), text)


def test_on_one_device_the_size_means_nothing() -> None:
    sizes = [f"worker.{owner}.ulysses_size=8" for owner in ("actor", "critic")]
    words = [*BASE, "worker.actor.model.model_path=org/model", "algorithm.adv_estimator=gae", *sizes]
    config, provenance = load_config(words)
    alone = config.model_copy(update={"trainer": config.trainer.model_copy(update={"n_gpus_per_node": 1})})
    require_shareable(alone, hf.MambaConfig())
    assert (alone.sequence_ranks(), alone.data_ranks()) == (1, 1)
    require_shareable(alone, hf.MambaConfig(), "critic")
    assert set(sizes) <= set(map(str, without_effect(alone, provenance)))
    assert not set(sizes) & set(map(str, without_effect(config, provenance)))


def test_a_critics_size_is_its_own_and_found_fault_with_by_its_own_name(tmp_path: Path) -> None:
    ppo = ["algorithm.adv_estimator=gae", "worker.critic.ulysses_size=4"]
    config = config_of(2, *ppo)
    assert (config.sequence_ranks("actor"), config.sequence_ranks("critic"), config.data_ranks("critic")) == (2, 4, 2)
    with pytest.raises(ConfigError, match=r"worker\.critic\.ulysses_size=4: takes layers that attend to all tokens"):
        require_shareable(config, hf.Gemma3TextConfig(), "critic")
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 6, "model_type": "qwen2"}))
    own = f"worker.critic.model.model_path={tmp_path}"
    with pytest.raises(ConfigError, match=r"worker\.critic\.ulysses_size=4 .*must divide the 6 heads of attention"):
        config_of(2, *ppo, own)
    with pytest.raises(ConfigError, match=r"worker\.critic\.ulysses_size=4 .*set worker\.critic\.padding_free=true"):
        config_of(2, *ppo, "worker.critic.padding_free=false")
    config_of(2, "worker.critic.ulysses_size=3")  # there is none


def test_the_plan_shows_how_many_devices_share_a_sequence() -> None:
    console = Console(record=True, width=120)
    console.print(render(make_plan(config_of(4, "trainer.nnodes=2"), 2100)))
    text = " ".join(console.export_text().split())
    assert "devices 16 nnodes × n_gpus_per_node devices per sequence 4 ulysses_size" in text
    assert "sequences per 4 devices 640 ÷ devices × ulysses_size" in text
    assert "worker.critic" not in text
    ppo = ["algorithm.adv_estimator=gae", "worker.critic.ulysses_size=2"]
    console.print(render(make_plan(config_of(4, "trainer.nnodes=2", *ppo), 2100)))
    text = " ".join(console.export_text().split())
    assert "devices per sequence 4 ulysses_size the critic's 2 worker.critic.ulysses_size" in text
