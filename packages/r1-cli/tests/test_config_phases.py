"""What each phase of a step takes of a GPU: what is counted, what leaves it, and which settings make it fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2Model

from r1_cli.config import RunConfig, load_config, without_effect
from r1_cli.config.model import ModelConfig
from r1_cli.config.section import lookup
from r1_cli.hardware import find_card
from r1_cli.models.load import enable_gradient_checkpointing
from r1_cli.plan.memory import estimate
from r1_cli.plan.model_sizes import TextSizes, from_config
from r1_cli.plan.phases import ASLEEP, CONTEXT, find_phases, find_remedies

GB = 10**9
BASE = [
    "data.train_files=owner/rows@train", "worker.reward.reward_function=math", "trainer.n_gpus_per_node=1",
    "worker.rollout.tensor_parallel_size=1", "worker.rollout.name=vllm", "worker.actor.global_batch_size=8",
    "data.rollout_batch_size=8",
]  # fmt: skip


MULTI_TURN = "worker.rollout.multi_turn"
EPISODES = [f"{MULTI_TURN}.enable=true", f"{MULTI_TURN}.tools=[calculator]", "worker.rollout.name=embedded"]
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


def write_model(folder: Path, parameters: int) -> Path:
    """A header without values, of so many parameters in 100 layers."""
    layer = {"dtype": "BF16", "shape": [parameters // 100], "data_offsets": [0, 0]}
    header = json.dumps({f"model.layers.{number}.w": layer for number in range(100)}).encode()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def config_of(folder: Path, *words: str, parameters: int = 10**9) -> RunConfig:
    return load_config([*BASE, f"worker.actor.model.model_path={write_model(folder, parameters)}", *words])[0]


def phases_of(config: RunConfig, card: int | None = None) -> dict[str, dict[str, int]]:
    memory = estimate(config)
    assert memory is not None
    return {phase.name: phase.parts for phase in find_phases(config, memory, card)}


def test_in_each_phase_is_what_the_learner_and_the_engine_leave_there(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path), card=24 * GB)
    cuda = {"CUDA": CONTEXT}
    engine, weights, states = {"engine's weights": 2 * GB}, {"weights": 4 * GB}, {"optimizer states": 8 * GB}
    # The reference's default is that it visits the GPU layer by layer (worker.ref.fsdp.enable_cpu_offload).
    assert phases["sampling"] == cuda | engine | {"engine's cache": int(0.6 * (24 * GB)) - 2 * GB}
    assert phases["weight sync"] == cuda | weights | engine
    learning, two_layers = cuda | weights | {"engine asleep": ASLEEP}, {"gathered": 2 * 2 * GB // 100}
    assert phases["log-probs"] == learning | two_layers | {"reference": 0}
    gradient = phases["gradient"]
    assert gradient.pop("activations") == 0  # the configuration names no sizes
    assert gradient == learning | two_layers | {"gradients": 4 * GB, "gathered gradients": 6 * GB // 100}
    assert phases["optimizer step"] == learning | states | {"gradients": 4 * GB}


@pytest.mark.parametrize(
    ("words", "phase", "more"),
    [
        (["worker.actor.offload.offload_params=false"], "sampling", {"weights": 4 * GB}),
        (["worker.actor.offload.offload_optimizer=false"], "sampling", {"optimizer states": 8 * GB}),
        (["worker.actor.offload.offload_optimizer=false"], "gradient", {"optimizer states": 8 * GB}),
        (["worker.ref.fsdp.enable_cpu_offload=false"], "sampling", {"reference": 2 * GB}),
        (["worker.ref.fsdp.enable_cpu_offload=false"], "gradient", {"reference": 2 * GB}),
        (["worker.rollout.name=embedded"], "gradient", {"engine's weights": 2 * GB}),
        (["worker.rollout.name=embedded"], "log-probs", {"engine's weights": 2 * GB}),
    ],
)
def test_what_stays_is_counted_where_it_stays(
    words: list[str], phase: str, more: dict[str, int], tmp_path: Path
) -> None:
    before, after = phases_of(config_of(tmp_path))[phase], phases_of(config_of(tmp_path, *words))[phase]
    assert {name: size for name, size in after.items() if before.get(name) != size} == more


CRITIC = ["algorithm.adv_estimator=gae", "algorithm.disable_kl=true"]


def test_a_critic_and_the_actor_are_there_one_at_a_time(tmp_path: Path) -> None:
    apart = [f"worker.rollout.engines.{key}=1" for key in ("nnodes", "n_gpus_per_node")]
    phases = phases_of(config_of(tmp_path, *CRITIC, *apart))
    values, optimizer, gradients = (f"critic's {part}" for part in ("weights", "optimizer states", "gradients"))
    own = {name: {part for part, size in parts.items() if size} - {"CUDA"} for name, parts in phases.items()}
    assert own == {
        "critic's values": {values},
        "critic's gradient": {values, gradients},
        "critic's optimizer step": {values, optimizer, gradients},
        "sampling": set(),
        "weight sync": {"weights"},
        "log-probs": {"weights", "gathered"},
        "gradient": {"weights", "gradients", "gathered", "gathered gradients"},
        "optimizer step": {"weights", "optimizer states", "gradients"},
    }
    assert [phases["critic's optimizer step"][part] // GB for part in (values, optimizer, gradients)] == [4, 8, 4]


def test_a_critic_that_stays_is_counted_once_in_every_phase(tmp_path: Path) -> None:
    stays = [f"worker.critic.offload.{key}=false" for key in ("offload_params", "offload_optimizer")]
    leaving, staying = (phases_of(config_of(tmp_path, *CRITIC, *words)) for words in ((), stays))
    more = {name: (sum(parts.values()) - sum(leaving[name].values())) // GB for name, parts in staying.items()}
    assert (more.pop("critic's values"), more.pop("critic's gradient")) == (8, 8)  # the weights are there anyhow
    assert more.pop("critic's optimizer step") == 0
    assert set(more.values()) == {12}


def test_where_a_critic_does_not_fit_its_own_settings_are_proposed(tmp_path: Path) -> None:
    stays = [f"worker.critic.offload.{key}=false" for key in ("offload_params", "offload_optimizer")]
    assert find_remedies(config_of(tmp_path, *CRITIC, *stays), 24 * GB) == [
        "worker.critic.offload.offload_optimizer=true"
    ]


LORA = ["worker.actor.model.lora.rank=8", "worker.rollout.name=embedded"]


def test_an_embedded_engine_of_an_adapter_takes_no_weights_of_its_own_and_the_base_stays_for_it(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path, *LORA))
    for name, parts in phases.items():
        assert parts["weights"] == 2 * GB, name
        assert not parts.get("engine's weights"), name
    (tmp_path / "own").mkdir()
    finer = phases_of(config_of(tmp_path / "own", *LORA, "worker.rollout.dtype=fp32"))
    assert finer["sampling"]["engine's weights"] == 4 * GB
    assert "weights" not in finer["sampling"]


@pytest.mark.parametrize(
    ("words", "on_gpu", "why"),
    [
        ([], False, None),
        ([], True, None),
        (["worker.rollout.dtype=fp32"], True, "samples in fp32, and the learner's is in bf16"),
        (["worker.rollout.dtype=fp32"], False, None),  # processors sample in it anyhow
        (["worker.actor.fsdp.torch_dtype=bf16"], False, "samples in fp32, and the learner's is in bf16"),
        (["worker.actor.fsdp.enable_cpu_offload=true"], True, "processor's memory"),
        (["worker.actor.fsdp.enable_cpu_offload=true"], False, None),
        (["worker.actor.model.quantization=nf4"], True, "4 bits"),
        (["worker.rollout.name=vllm"], True, "only the embedded engine"),
        (["trainer.n_gpus_per_node=2"], False, "a process of its own"),
    ],
)
def test_engine_and_learner_have_one_base_where_it_is_the_same_numbers_on_the_same_device(
    words: list[str], on_gpu: bool, why: str | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, *LORA, *words)
    found = config.why_copied(on_gpu=on_gpu)
    assert config.shares_base(on_gpu=on_gpu) == (why is None)
    assert found is None if why is None else why in (found or "")


def test_that_the_base_does_not_leave_for_an_engine_that_samples_from_it_is_said_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    asked, key = "worker.actor.offload.offload_params=true", "worker.actor.offload.offload_params"
    folder = f"worker.actor.model.model_path={write_model(tmp_path, 8)}"
    for words, said in (([*LORA, asked], True), (LORA, False), ([*LORA, asked, "worker.rollout.dtype=fp32"], False)):
        assert (key in [limit.key for limit in without_effect(*load_config([*BASE, folder, *words]))]) == said


def test_a_reference_that_leaves_between_phases_is_there_for_its_log_probs_alone(tmp_path: Path) -> None:
    words = ["worker.ref.fsdp.enable_cpu_offload=false", "worker.ref.offload.offload_params=true"]
    phases = phases_of(config_of(tmp_path, *words))
    assert [name for name, parts in phases.items() if parts.get("reference")] == ["log-probs"]


def test_a_learner_that_the_processor_keeps_takes_no_states_of_the_gpu(tmp_path: Path) -> None:
    phases = phases_of(config_of(tmp_path, "worker.actor.fsdp.enable_cpu_offload=true"))
    for parts in phases.values():
        assert not any(parts.get(name) for name in ("weights", "gradients", "optimizer states"))


def test_servers_and_engines_apart_take_nothing_and_nothing_leaves_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("R1_SERVERS_TOKEN", "secret")
    parts = phases_of(config_of(tmp_path, "worker.rollout.servers.urls=[http://a:8000]"))["sampling"]
    assert parts == {"CUDA": CONTEXT, "weights": 4 * GB, "optimizer states": 8 * GB}


@pytest.mark.parametrize(
    ("card", "words", "expected"),
    [
        (48, [], []),
        (24, [], []),
        (18, [], ["worker.actor.optim.strategy=adamw_bf16"]),
        (18, ["worker.actor.offload.offload_optimizer=false"], ["worker.actor.optim.strategy=adamw_bf16"]),
        (9, [], ["worker.actor.fsdp.enable_cpu_offload=true"]),
        (3, [], None),
    ],
)
def test_settings_are_named_with_which_a_step_fits_and_no_others(
    card: int, words: list[str], expected: list[str] | None, tmp_path: Path
) -> None:
    config = config_of(tmp_path, *words, "worker.ref.fsdp.enable_cpu_offload=true")
    found = find_remedies(config, card * GB)
    if expected is None or not expected:
        assert found == expected
        return
    assert found is not None
    assert set(expected) <= set(found)
    changed = config_of(tmp_path, *words, *found)
    memory = estimate(changed)
    assert memory is not None
    assert all(phase.total <= card * GB for phase in find_phases(changed, memory, card * GB))
    for left_out in found:  # each is needed
        fewer = config_of(tmp_path, *words, *(word for word in found if word != left_out))
        memory = estimate(fewer)
        assert memory is not None
        assert any(phase.total > card * GB for phase in find_phases(fewer, memory, card * GB)), left_out


def test_the_turns_that_the_embedded_engine_keeps_are_counted_up_to_what_all_episodes_need(tmp_path: Path) -> None:
    def kept(*words: str) -> int | None:
        config = config_of(tmp_path, *EPISODES, *words)
        (tmp_path / "config.json").write_text(json.dumps(SIZES))
        return phases_of(config)["sampling"].get("kept turns")

    of_token = 2 * 2 * 64 * 2  # keys and values, layers, width, bytes
    lengths = ["data.max_prompt_length=100", "data.max_response_length=156", "worker.rollout.n=2"]
    assert kept(*lengths) == 256 * 8 * 2 * of_token
    assert kept(*lengths, f"{MULTI_TURN}.prefix_cache_gb=0.0009765625") == 1 << 20
    assert kept(*lengths, f"{MULTI_TURN}.prefix_cache_gb=0") == 0
    assert kept(f"{MULTI_TURN}.enable=false") is None
    assert kept("worker.rollout.name=vllm") is None  # whose cache is a share of the GPU


def test_where_kept_turns_do_not_fit_it_is_proposed_to_keep_none(tmp_path: Path) -> None:
    config = config_of(tmp_path, *EPISODES, parameters=10**6)
    assert phases_of(config)["sampling"]["kept turns"] == 4 << 30  # the model's configuration names no sizes
    assert find_remedies(config, 2 * GB) == [f"{MULTI_TURN}.prefix_cache_gb=0"]


def test_models_of_the_hub_get_no_advice() -> None:
    config = load_config([*BASE, "worker.actor.model.model_path=owner/model"])[0]
    assert find_remedies(config, 24 * GB) is None
    assert lookup(config, "worker.actor.model.model_path") == "owner/model"


@pytest.mark.parametrize("way", ["all", "checkpointed", "checkpointed on the host"])
def test_layers_keep_for_their_backward_pass_what_is_counted(way: str) -> None:
    """torch's own hooks see each tensor that a backward pass will need."""
    tokens, sizes = 256, TextSizes(layers=3, hidden=128, keys=64, width=256)
    checkpointed, on_host = way != "all", way == "checkpointed on the host"

    def kept(layers: int) -> int:
        config = Qwen2Config(
            hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, attn_implementation="sdpa",
        )  # fmt: skip
        model = Qwen2Model(config).bfloat16().train()
        if checkpointed:
            enable_gradient_checkpointing(model, on_host=on_host)
        own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
        seen = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                seen[storage._cdata] = storage  # held, so that no other gets its place
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.arange(tokens)[None] % 64, use_cache=False)
        return sum(storage.nbytes() for storage in seen.values())

    layer = (kept(3) - kept(1)) / 2
    counted = tokens * 2 * (sizes.hidden if checkpointed else sizes.token_of_a_layer)
    assert layer == (0 if on_host else pytest.approx(counted, rel=0.05))
    found = [sizes.activation_bytes(n, 2, checkpointed=checkpointed, on_host=on_host) for n in (0, tokens)]
    again = tokens * 2 * sizes.token_of_a_layer if checkpointed else 0
    assert found[1] - found[0] == (1 if on_host else 3) * counted + again


def test_gradients_are_the_same_to_the_bit_where_layers_inputs_wait_with_the_processor() -> None:
    gradients = []
    for on_host in (False, True):
        torch.manual_seed(0)
        model: Any = Qwen2Model(Qwen2Config(hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=64))
        enable_gradient_checkpointing(model, on_host=on_host)
        model(torch.arange(24)[None], use_cache=False).last_hidden_state.square().sum().backward()
        gradients.append([param.grad for param in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_sizes_are_read_from_the_configuration_of_text_and_pictures(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
    for written, keys in ((text, 64), ({"text_config": {**text, "num_key_value_heads": 1}}, 16)):
        (tmp_path / "config.json").write_text(json.dumps(written))
        sizes = TextSizes(2, 64, keys, 96)
        assert from_config(tmp_path / "config.json", {}, ModelConfig()).text == sizes
        assert sizes.cache_bytes(10, 2) == 2 * 2 * keys * 10 * 2
    for broken in ("", "[]", "{}", '{"text_config": 3}'):
        (tmp_path / "config.json").write_text(broken)
        assert from_config(tmp_path / "config.json", {}, ModelConfig()).text is None
    assert from_config(tmp_path / "nowhere/config.json", {}, ModelConfig()).text is None


@pytest.mark.parametrize(
    ("says", "found"), [("echo 24564; echo 12288", 12288 << 20), ("exit 9", None), ("echo N/A", None), ("", None)]
)
def test_the_smallest_card_of_the_machine_is_what_its_driver_says(
    says: str, found: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{says}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert find_card() == found
