"""`r1 estimate`: counted bytes against measured ones, devices by name, models by their config.json, odd input."""

import json
from dataclasses import replace
from functools import cache, reduce
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, Qwen2Config, Qwen3MoeConfig

from r1_cli.build.parameters import freeze
from r1_cli.config import RunConfig, load_config
from r1_cli.config.model import LoraConfig, ModelConfig
from r1_cli.main import main
from r1_cli.models.adapters import Adapters, Form
from r1_cli.models.load import ModelError, load_model
from r1_cli.plan.estimate.cards import CardError, Cards, read_cards
from r1_cli.plan.estimate.estimate import WAYS, Estimate, as_on_cpu, estimate_on_cards, find_savings, find_ways
from r1_cli.plan.estimate.models import find_models
from r1_cli.plan.estimate.times import Assumptions, Work
from r1_cli.plan.host import find_host
from r1_cli.plan.memory import estimate
from r1_cli.plan.model_sizes import Models, ModelSizes, read_sizes
from r1_cli.plan.phases import find_peak, find_phases, with_value
from r1_core.learner.parallel import find_blocks
from r1_rollout.loading import model_family

ROOT = Path(__file__).parents[3]
QUICKSTART, MODEL = str(ROOT / "examples/quickstart/config.yaml"), ROOT / "examples/quickstart/model"
GB = 10**9
TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96,
}  # fmt: skip
LARGE = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(model: Path | str, *words: str) -> RunConfig:
    return load_config([QUICKSTART, f"worker.actor.model.model_path={model}", *words])[0]


def only_config(folder: Path, config: Any) -> Path:
    config.save_pretrained(folder)
    return folder


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["estimate", *words])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def held_for_backward(model: Any, **inputs: Any) -> int:
    """Bytes that a forward pass keeps for its backward pass, beside weights, as torch's own hooks see them."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers(), *inputs.values())}
    seen = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in own:
            seen[storage._cdata] = storage  # held, so that no other gets its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**inputs)
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_gradients_and_states_of_the_quickstart_are_what_they_take_on_processors(dtype: str) -> None:
    config = as_on_cpu(config_of(MODEL, f"worker.actor.fsdp.torch_dtype={dtype}"))
    config = with_value(config, "worker.actor.micro_batch_size_per_device_for_update", 10**6)  # one: no sums beside
    memory = estimate(config)
    assert memory is not None
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    family = AutoConfig.from_pretrained(MODEL)
    model = load_model(str(MODEL), config=family, dtype=torch_dtype, device=torch.device("cpu"))
    weights = list(model.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW(weights)
    optimizer.step()
    states = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    measured = [sum(tensor.nbytes for tensor in tensors) for tensors in (weights, [w.grad for w in weights], states)]
    assert [memory.weights, memory.gradients, memory.optimizer] == measured


@pytest.mark.parametrize("layers", [2, 6])
def test_activations_of_text_are_within_15_percent_of_the_measured(layers: int, tmp_path: Path) -> None:
    made = Qwen2Config(**TEXT | {"num_hidden_layers": layers}, tie_word_embeddings=True, attn_implementation="sdpa")
    words = ["worker.actor.fsdp.torch_dtype=bf16", "worker.actor.micro_batch_size_per_device_for_update=8"]
    config = as_on_cpu(config_of(only_config(tmp_path / "model", made), *words))
    memory = estimate(config, find_models(config)[0])
    assert memory is not None
    counted = {phase.name: phase.parts for phase in find_phases(config, memory, on_gpu=False)}["gradient"]
    model = model_family(made).from_config(made).bfloat16().train()
    tokens = torch.arange(8 * 84)[None] % 96  # sequences of 64 + 20
    measured = held_for_backward(model.model, input_ids=tokens)
    assert counted["activations"] == pytest.approx(measured, rel=0.15)


def test_activations_of_the_quickstarts_tower_are_within_15_percent_of_the_measured() -> None:
    family = AutoConfig.from_pretrained(MODEL, attn_implementation="sdpa")
    sizes = read_sizes(config_of(MODEL).worker.actor.model)
    assert sizes is not None
    tower = sizes.tower
    assert tower is not None
    visual = model_family(family).from_config(family).bfloat16().train().get_encoder(modality="image")
    grid = torch.tensor([[1, 32, 32]])
    patches = 32 * 32
    pixels = torch.randn(patches, tower.pixels).bfloat16()
    measured = held_for_backward(visual, hidden_states=pixels, grid_thw=grid)
    assert tower.activation_bytes(patches, 2, checkpointed=False) == pytest.approx(measured, rel=0.15)


FAMILIES = {
    "text": Qwen2Config(**TEXT, tie_word_embeddings=False),
    "tied": Qwen2Config(**TEXT, tie_word_embeddings=True),
    "mixture": Qwen3MoeConfig(
        **TEXT, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False
    ),
    "pictures": AutoConfig.from_pretrained(MODEL),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_json_alone_gives_the_parameters_of_the_model(name: str, tmp_path: Path) -> None:
    config = config_of(only_config(tmp_path / "model", FAMILIES[name]))
    models, notes = find_models(config)
    memory = estimate(config, models)
    assert memory is not None
    assert memory.parameters == sum(
        weight.numel() for weight in model_family(FAMILIES[name]).from_config(FAMILIES[name]).parameters()
    )
    assert "no weights here" in notes[0]


TRAINED = {
    "all": {}, "some": {"freeze": [".*embed.*"]}, "no tower": {"freeze_vision_tower": True},
    "adapter": {"lora": LoraConfig(rank=8)}, "everywhere": {"lora": LoraConfig(rank=4, exclude_modules=None)},
    "two products": {"lora": LoraConfig(rank=4, target_modules=["q_proj", "v_proj"])},
}  # fmt: skip


@pytest.mark.parametrize("settings", TRAINED)
@pytest.mark.parametrize("name", ["text", "tied", "pictures"])
def test_what_is_decided_by_names_is_what_the_learner_decides_by_the_model(name: str, settings: str) -> None:
    chosen: dict[str, Any] = TRAINED[settings]
    if settings == "no tower" and name != "pictures":
        return
    with torch.device("meta"):
        model = model_family(FAMILIES[name]).from_config(FAMILIES[name])
    sizes, section = ModelSizes({key: tuple(w.shape) for key, w in model.named_parameters()}), ModelConfig(**chosen)
    blocks = [sum(weight.numel() for weight in block.parameters()) for block in find_blocks(model)]
    assert sizes.block_sizes == (max(blocks), sizes.parameters - sum(blocks))
    if section.lora.used:
        Adapters(Form.of(section.lora)).inject(model)
        trained = [weight for key, weight in model.named_parameters() if ".lora_" in key]
    else:
        freeze(section, model)
        trained = [weight for weight in model.parameters() if weight.requires_grad]
    assert sizes.count_trained(section) == sum(weight.numel() for weight in trained)


def test_of_a_mixture_a_token_goes_through_the_experts_that_it_chooses(tmp_path: Path) -> None:
    folder = only_config(tmp_path / "model", FAMILIES["mixture"])
    sizes = find_models(config_of(folder))[0]["actor"]
    assert sizes.text is not None
    assert (sizes.text.experts, sizes.text.chosen, sizes.text.width) == (8, 2, 64)
    work = Work.of(sizes, 1.0)
    everything = Work.of(replace(sizes, text=replace(sizes.text, experts=1, chosen=1)), 1.0)
    assert everything.of_token - work.of_token == 3 * (3 * 64 * 32) * 6  # layers, products, experts not chosen
    assert (
        everything.of_token
        == sum(w.numel() for w in model_family(FAMILIES["mixture"]).from_config(FAMILIES["mixture"]).parameters())
        - 96 * 64
    )


def test_a_model_whose_weights_are_here_is_read_as_it_is() -> None:
    config = config_of(MODEL)
    models, notes = find_models(config)
    assert (models, notes) == ({"actor": read_sizes(config.worker.actor.model)}, [])


def test_a_name_of_the_hub_is_found_in_its_cache_and_else_the_command_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"worker\.actor\.model\.model_path=owner/model.*hf download owner/model"):
        find_models(config_of("owner/model"))
    snapshot = tmp_path / "models--owner--model/snapshots/0123456789abcdef0123456789abcdef01234567"
    only_config(snapshot, FAMILIES["text"])
    (tmp_path / "models--owner--model/refs").mkdir()
    (tmp_path / "models--owner--model/refs/main").write_text(snapshot.name)
    config = config_of("owner/model")
    models, notes = find_models(config)
    assert estimate(config, models) is not None
    assert notes == ["owner/model: no weights here, counted from its config.json"]


@pytest.mark.parametrize(
    "written", ["", "[]", "{}", '{"model_type": "nothing"}', '{"model_type": "qwen2", "hidden_size": "x"}']
)
def test_a_config_json_that_makes_no_model_is_refused_by_its_key(written: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(written)
    with pytest.raises(ModelError, match=r"worker\.actor\.model\.model_path"):
        find_models(with_value(config_of(MODEL), "worker.actor.model.model_path", str(tmp_path / "model")))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8xH100-80GB", Cards(1, 8, "H100", 80 * GB)),
        ("1xh100", Cards(1, 1, "H100", 80 * GB)),
        ("16xA100-40gb", Cards(2, 8, "A100", 40 * GB)),
        ("4x4xL40S", Cards(4, 4, "L40S", 48 * GB)),
        ("1xRTX4090", Cards(1, 1, "RTX 4090", 24 * GB)),
        ("2xRTX_4090-24", Cards(1, 2, "RTX 4090", 24 * GB)),
        ("8xH100 PCIe", Cards(1, 8, "H100 PCIe", 80 * GB)),
        ("8xH100-PCIe-80GB", Cards(1, 8, "H100 PCIe", 80 * GB)),
        ("1xA10-24GiB", Cards(1, 1, "A10", 24 << 30)),
    ],
)
def test_devices_are_read_by_name(text: str, found: Cards) -> None:
    assert read_cards(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("8xMI300X", "no GPU MI300X is known; there are B200, H200"),
        ("H100", "write NUMBERxNAME-MEMORY"),
        ("", "write NUMBERxNAME-MEMORY"),
        ("0xH100", "at least one"),
        ("0x8xH100", "at least one"),
        ("12xH100", "NODESxNUMBERxNAME"),
        ("8xH100-0GB", "0 GB is no GPU's memory"),
        ("8xH100-99999999GB", "is no GPU's memory"),
        ("-1xH100", "write NUMBERxNAME-MEMORY"),
        ("8xH100-nanGB", "write NUMBERxNAME-MEMORY"),
        ("8xH100-1e3GB", "write NUMBERxNAME-MEMORY"),
    ],
)
def test_what_names_no_devices_is_refused(text: str, said: str) -> None:
    with pytest.raises(CardError, match=said):
        read_cards(text)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """Eight billion parameters, of which nothing is here."""
    folder = tmp_path_factory.mktemp("large")
    words = [
        "trainer.n_gpus_per_node=8", "data.rollout_batch_size=128", "worker.actor.global_batch_size=128",
        "data.max_prompt_length=1024", "data.max_response_length=4096", "worker.rollout.dtype=bf16",
        "worker.actor.micro_batch_size_per_device_for_update=4", "worker.actor.fsdp.mp_param_dtype=bf16",
        "worker.rollout.name=vllm",
    ]  # fmt: skip
    return config_of(only_config(folder / "model", Qwen2Config(**LARGE)), *words)


@cache
def models_in(path: str) -> Models:
    return find_models(config_of(path))[0]


def models_of(config: RunConfig) -> Models:
    return models_in(config.worker.actor.model.model_path or "")


def test_the_settings_that_make_it_fit_are_named_the_largest_saving_first(large: RunConfig) -> None:
    room = 48 * GB
    found = find_savings(large, models_of(large), room, on_gpu=True)
    assert found
    savings = [saved for _, saved in found]
    assert savings == sorted(savings, reverse=True)
    assert all(saved > 0 for saved in savings)
    changed = large
    for text, _ in found:
        key, _, value = text.partition("=")
        typed = {"true": True, "false": False}.get(value, value)
        changed = with_value(changed, key, float(value) if typed == value and value[0].isdigit() else typed)
    before, after = (find_peak(config, room, models=models_of(large)) or 0 for config in (large, changed))
    assert after <= room < before


def test_ranks_have_the_rest_and_two_layers_whole(large: RunConfig) -> None:
    block, rest = models_of(large)["actor"].block_sizes
    assert rest == 2 * 151936 * 4096 + 4096
    memory = estimate(large, models_of(large))
    assert memory is not None
    assert memory.parameters == 36 * block + rest
    phases = {phase.name: phase.parts for phase in find_phases(large, memory, 80 * GB)}
    assert phases["gradient"]["gathered"] == 2 * (rest + 2 * block)
    assert phases["gradient"]["gathered gradients"] == rest * (2 + 4)
    alone = with_value(large, "trainer.n_gpus_per_node", 1)
    memory = estimate(alone, models_of(alone))
    assert memory is not None
    one_gpu = {phase.name: phase.parts for phase in find_phases(alone, memory, 80 * GB)}["gradient"]
    assert (one_gpu["gathered"], one_gpu["gathered gradients"]) == (2 * (rest + 2 * block), rest * (2 + 4))
    assert all("gathered" not in phase.parts for phase in find_phases(alone, memory, on_gpu=False))


def parts_of(config: RunConfig, phase: str) -> dict[str, int]:
    memory = estimate(config, models_of(config))
    assert memory is not None
    return {one.name: one.parts for one in find_phases(config, memory, 80 * GB)}[phase]


def test_devices_that_share_sequences_share_their_activations_and_an_adapter_has_few_states(large: RunConfig) -> None:
    whole = parts_of(large, "gradient")
    shared = parts_of(with_value(large, "worker.actor.ulysses_size", 4), "gradient")
    assert shared["activations"] == whole["activations"] // 4
    assert shared["gathered"] == whole["gathered"]
    adapted = parts_of(with_value(large, "worker.actor.model.lora.rank", 8), "optimizer step")
    assert 0 < adapted["optimizer states"] < parts_of(large, "optimizer step")["optimizer states"] / 100
    copies = parts_of(with_value(large, "worker.actor.fsdp.fsdp_size", 2), "optimizer step")
    assert copies["weights"] == 4 * parts_of(large, "optimizer step")["weights"]
    stays = with_value(large, "worker.actor.fsdp.enable_full_shard", False)
    assert parts_of(stays, "gradient")["weights"] == whole["weights"]
    assert parts_of(stays, "gradient")["gathered"] == 8 * whole["weights"] // 2  # all of it, in half precision
    nodes = parts_of(with_value(large, "trainer.nnodes", 2), "optimizer step")
    assert nodes["weights"] == parts_of(large, "optimizer step")["weights"] // 2


def test_a_critic_is_counted_from_its_own_config_json(tmp_path: Path) -> None:
    folder = only_config(tmp_path / "model", FAMILIES["text"])
    config = config_of(folder, "algorithm.adv_estimator=gae")
    models, notes = find_models(config)
    memory = estimate(config, models)
    assert memory is not None
    assert memory.critic is not None
    assert memory.critic.weights == (memory.parameters - 96 * 64) * 4  # without the head
    assert len(notes) == 2


def estimate_of(config: RunConfig, cards: str = "8xH100-80GB", **assumed: Any) -> Estimate:
    return estimate_on_cards(config, models_of(config), read_cards(cards), Assumptions(**assumed))


def test_times_go_with_what_they_rest_on(large: RunConfig) -> None:
    found = estimate_of(large)
    passes = ("log-probs", "gradient")
    slower = estimate_of(large, learning=0.2)
    assert [slower.times[name] for name in passes] == pytest.approx([2 * found.times[name] for name in passes])
    shorter = estimate_of(large, answer_tokens=1024)
    assert shorter.times["sampling"] < found.times["sampling"] / 3
    assert shorter.tokens == found.tokens / 4
    lazier = estimate_of(large, sampling=0.25)
    assert lazier.times["sampling"] == pytest.approx(2 * found.times["sampling"], rel=0.2)
    ahead = estimate_of(with_value(large, "trainer.max_staleness", 1))
    assert ahead.seconds == max(ahead.times["sampling"], sum(ahead.times.values()) - ahead.times["sampling"])
    checkpointed = estimate_of(with_value(large, "worker.actor.model.enable_gradient_checkpointing", True))
    assert checkpointed.times["gradient"] == pytest.approx(found.times["gradient"] * 4 / 3)
    with_reference = estimate_of(with_value(large, "algorithm.disable_kl", False))
    assert with_reference.times["reference's log-probs"] == found.times["log-probs"]


def test_a_forward_pass_takes_two_operations_a_weight_and_a_token_and_attention(large: RunConfig) -> None:
    tokens, longest = 128 * (1024 + 8 * 4096), 1024 + 4096  # prompts once
    weights = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 151936 * 4096  # products, and the head
    operations = tokens * (2 * weights + 2 * 36 * 4096 * longest)
    assert estimate_of(large).times["log-probs"] == pytest.approx(operations / (8 * 0.4 * 989e12), rel=0.01)


def test_the_command_tells_what_does_not_fit_in_100_columns_and_by_its_exit_code(
    large: RunConfig, tmp_path: Path
) -> None:
    model = large.worker.actor.model.model_path
    words = [QUICKSTART, f"worker.actor.model.model_path={model}", "worker.rollout.dtype=bf16"]
    code, out, _ = run(*words, "--gpus", "1xRTX4090-24GB")
    assert code == 1
    assert "it does not fit" in out
    assert max(map(len, out.splitlines())) <= 100
    code, out, _ = run(*words, "--gpus", "8xH200", "--json")
    told = json.loads(out)
    assert (code, told["fits"], told["remedies"]) == (0, True, [])
    assert told["states"]["parameters"] > 8 * GB
    assert told["step"]["seconds"] == pytest.approx(sum(told["seconds"].values()))
    assert sum(told["phases"][0]["parts"].values()) == told["phases"][0]["bytes"]


def test_on_processors_the_quickstart_fits_and_no_time_is_told() -> None:
    code, out, _ = run(QUICKSTART)
    assert code == 0
    assert "it fits" in out
    assert "CUDA" not in out
    assert "seconds" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "8xABC"], "no GPU ABC is known"),
        (["worker.rollout.nn=3"], "did you mean"),
        (["--gpus", "3xH100"], "devices"),
        (["--answer-tokens", "0"], "0 is not in the range"),
        (["--learning-efficiency", "nan"], "finite"),
    ],
)
def test_odd_words_are_answered_with_what_is_wrong(words: list[str], said: str) -> None:
    code, _, err = run(QUICKSTART, *words)
    assert code == 2
    assert said in err


OFFLOAD = ("actor.offload.offload_params", "actor.offload.offload_optimizer")


@pytest.fixture
def alone(large: RunConfig) -> RunConfig:
    """One GPU, which offloads what is at rest."""
    settings = [("trainer.n_gpus_per_node", 1), *((f"worker.{name}", True) for name in OFFLOAD)]
    return reduce(lambda config, setting: with_value(config, *setting), settings, large)


def test_host_memory_counts_what_fsdp_locks_rounded_up_and_what_is_offloaded_as_it_is(alone: RunConfig) -> None:
    models = models_of(alone)
    memory = estimate(alone, models)
    assert memory is not None
    found = find_host(alone, memory)
    assert (found["weights"], found["optimizer states"]) == (memory.weights, memory.optimizer)
    kept = find_host(with_value(alone, "worker.actor.fsdp.enable_cpu_offload", True), memory)
    each = [1 << (4 * prod(shape) - 1).bit_length() for shape in models["actor"].shapes.values()]
    assert kept["weights"] == kept["gradients"] == sum(each) > 1.3 * memory.weights
    assert kept["optimizer states"] == memory.optimizer
    ranks = with_value(alone, "trainer.n_gpus_per_node", 8)
    eight = find_host(ranks, estimate(ranks, models) or memory)
    assert eight["weights"] == pytest.approx(memory.weights, rel=1e-6), "each of eight ranks keeps its share"
    nothing = reduce(
        lambda config, name: with_value(config, f"worker.{name}", False),
        (*OFFLOAD, "ref.fsdp.enable_cpu_offload"),
        alone,
    )
    assert find_host(nothing, memory) == {}
    saved = find_host(with_value(nothing, "worker.actor.model.enable_activation_offload", True), memory)
    assert saved["activations"] % 36 == 0


def test_ways_to_run_it_are_listed_with_what_each_takes(alone: RunConfig) -> None:
    ways = {way.name: way for way in find_ways(alone, models_of(alone), 80 * GB)}
    assert list(ways) == [name for name, _ in WAYS]
    usual, halved, lora, packed = (ways[WAYS[number][0]] for number in (0, 1, 3, 4))
    assert usual.device > lora.device > packed.device
    assert halved.device > lora.device
    assert packed.host <= lora.host < usual.host
    assert lora.settings == ["worker.actor.model.lora.rank=32"]
    adapted = with_value(alone, "worker.actor.model.lora.rank", 32)
    assert WAYS[3][0] not in [way.name for way in find_ways(adapted, models_of(adapted), 80 * GB)]
