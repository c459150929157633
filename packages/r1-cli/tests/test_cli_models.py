"""What r1 asks of a model before and after loading it, on the quickstart's model and on tiny text models."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from r1_cli.models import load as models
from r1_cli.models import sharded_loading
from r1_cli.models.load import PatchEmbedding, replace_patch_convolutions
from r1_core.learner.parallel import Parallel, Shard, full_tensor
from r1_data.positions import position_ids_of
from r1_rollout import tokens
from r1_rollout.embedded.stack import stack_of
from r1_rollout.loading import model_family

MODEL = Path(__file__).resolve().parents[3] / "examples/quickstart/model"
CPU = torch.device("cpu")
TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "moe_intermediate_size": 8, "num_experts": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def config():  # type: ignore[no-untyped-def]
    return models.load_config(str(MODEL))


@pytest.fixture(scope="module")
def model(config):  # type: ignore[no-untyped-def]
    return models.load_model(str(MODEL), config=config, dtype=torch.float32, device=CPU)


def test_every_token_that_stands_for_media_is_known(config) -> None:  # type: ignore[no-untyped-def]
    tokenizer, _ = models.load_tokenizer(str(MODEL), vision_language=True)
    banned = {tokenizer.convert_ids_to_tokens(token) for token in tokens.media_token_ids(config, tokenizer)}
    assert banned == {"<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"}


def test_answers_end_where_the_model_says(model) -> None:  # type: ignore[no-untyped-def]
    tokenizer, _ = models.load_tokenizer(str(MODEL), vision_language=True)
    ends = {
        tokenizer.convert_ids_to_tokens(token)
        for token in tokens.end_token_ids(model.generation_config, model.config, tokenizer)
    }
    assert "<|im_end|>" in ends
    assert not any("vision" in end or "pad|" in end for end in ends)


def test_positions_are_the_models_own_with_the_text_axis_in_front(config, model) -> None:  # type: ignore[no-untyped-def]
    image = config.image_token_id
    token_ids = torch.tensor([1, 2, *[image] * 16, 3, 4])
    kinds, grid = (token_ids == image).int(), torch.tensor([[1, 8, 8]])
    position_ids = position_ids_of(config)
    assert position_ids is not None
    actual = position_ids(token_ids, {"mm_token_type_ids": kinds[None], "image_grid_thw": grid})
    own, _ = model.model.get_rope_index(token_ids[None], mm_token_type_ids=kinds[None], image_grid_thw=grid)
    assert actual[0].tolist() == list(range(20))
    assert torch.equal(actual[1:], own[:, 0])


def test_a_prompt_without_pictures_has_positions_too(config) -> None:  # type: ignore[no-untyped-def]
    position_ids = position_ids_of(config)
    assert position_ids is not None
    assert torch.equal(position_ids(torch.tensor([5, 6, 7]), {}), torch.arange(3).expand(4, 3))


def test_text_models_count_tokens() -> None:
    assert position_ids_of(Qwen2Config()) is None


def test_models_never_share_a_configuration(config, model) -> None:  # type: ignore[no-untyped-def]
    other = models.load_model(str(MODEL), config=config, dtype=torch.float32, device=CPU)
    other.set_attn_implementation("eager")
    assert model.config._attn_implementation != "eager"


DROPPING = {
    "attention_dropout": Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attention_dropout=0.5,
    ),
    "embd_pdrop": GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0.5, bos_token_id=1),
}  # fmt: skip


@pytest.mark.parametrize("small", DROPPING.values(), ids=DROPPING)
def test_dropout_is_off_even_in_training_mode(small: PreTrainedConfig, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path)
    loaded = models.load_model(str(tmp_path), config=models.load_config(str(tmp_path)), dtype=torch.float32, device=CPU)
    loaded.train()
    ids = torch.arange(8)[None]
    assert torch.equal(loaded(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_patches_are_multiplied_to_what_the_convolution_makes_of_them(model) -> None:  # type: ignore[no-untyped-def]
    embedding = model.model.visual.patch_embed.proj
    assert isinstance(embedding, PatchEmbedding)
    patches = torch.randn(9, 3, *embedding.kernel_size, requires_grad=True)
    found, expected = embedding(patches), torch.nn.Conv3d.forward(embedding, patches)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad(out.square().sum(), [patches, embedding.weight]) for out in (found, expected)]
    for here, there in zip(*gradients, strict=True):
        torch.testing.assert_close(here, there, atol=1e-4, rtol=1e-4)


def test_a_convolution_over_more_than_one_patch_stays_one() -> None:
    plain = torch.nn.Conv3d(3, 4, (2, 3, 3), stride=(2, 3, 3))
    padded = torch.nn.Conv3d(3, 4, (2, 3, 3), padding=1)
    pictures = torch.randn(2, 3, 2, 6, 9)
    expected = plain(pictures), padded(pictures)
    replace_patch_convolutions(torch.nn.ModuleList([plain, padded]))
    assert [type(plain), type(padded)] == [PatchEmbedding, torch.nn.Conv3d]
    assert torch.equal(plain(pictures), expected[0])
    assert torch.equal(padded(pictures), expected[1])


def test_there_is_no_vision_tower_to_freeze_in_a_text_model() -> None:
    small = Qwen2Config(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                        num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    with pytest.raises(models.ModelError, match="no vision tower"):
        models.freeze_vision(Qwen2ForCausalLM(small))


def test_a_missing_weight_is_named_and_not_left_at_random(tmp_path: Path, config) -> None:  # type: ignore[no-untyped-def]
    shutil.copytree(MODEL, tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    weights.pop("lm_head.weight")
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(models.ModelError, match=r"1 weights are missing or of another shape: lm_head.weight"):
        models.load_model(str(tmp_path / "model"), config=config, dtype=torch.float32, device=CPU)


def vision_tokens(config, *kinds: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # type: ignore[no-untyped-def]
    """Two text tokens around a picture of 2 × 3 tokens and a video of 2 moments of 2 × 2, in the order of `kinds`."""
    lengths, codes = {"image": 6, "video": 8}, {"image": 1, "video": 2}
    token_ids, types = [5, 6], [0, 0]
    for kind in kinds:
        token_ids += [getattr(config, f"{kind}_token_id")] * lengths[kind] + [7, 8]
        types += [codes[kind]] * lengths[kind] + [0, 0]
    media = {"mm_token_type_ids": torch.tensor([types])}
    if "image" in kinds:
        media["image_grid_thw"] = torch.tensor([[1, 4, 6]])
    if "video" in kinds:
        media |= {"video_grid_thw": torch.tensor([[2, 4, 4]]), "second_per_grid_ts": torch.tensor([1.0])}
    return torch.tensor(token_ids), media


@pytest.mark.parametrize("kinds", [("image", "video"), ("video", "image"), ("video",)])
def test_positions_of_videos_are_the_models_own_here_and_in_a_worker(config, model, kinds) -> None:  # type: ignore[no-untyped-def]
    token_ids, media = vision_tokens(config, *kinds)
    position_ids = position_ids_of(config)
    copied = pickle.loads(pickle.dumps(position_ids))
    own, _ = model.model.get_rope_index(token_ids[None], **media)
    for rule in (position_ids, copied):
        assert torch.equal(rule(token_ids, media)[1:], own[:, 0])
    moments = own[0, 0][media["mm_token_type_ids"][0] == 2].unique()
    assert len(moments) == 2
    assert moments[1] - moments[0] == config.vision_config.tokens_per_second  # a second lies between them


def test_a_model_whose_text_attends_in_both_directions_is_refused(tmp_path):
    transformers.Gemma3TextConfig(use_bidirectional_attention=True).save_pretrained(tmp_path)
    with pytest.raises(models.ModelError, match="gemma3_text attends in both directions"):
        models.load_config(str(tmp_path))
    transformers.Gemma3TextConfig().save_pretrained(tmp_path)
    assert models.load_config(str(tmp_path)).model_type == "gemma3_text"


@pytest.fixture
def alone():  # type: ignore[no-untyped-def]
    """The only rank of its process group."""
    yield Parallel.single_process("cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize("group", [None, "alone"], ids=["one process", "one rank"])
def test_an_engine_decodes_a_loaded_model_by_its_stack(group, config, request) -> None:  # type: ignore[no-untyped-def]
    """No hook of a learner's keeps an engine of the same process from its faster decoder and from graphs."""
    parallel = None if group is None else request.getfixturevalue(group)
    loaded = models.load_model(str(MODEL), config=config, dtype=torch.float32, device=CPU)
    stack = stack_of(loaded)
    assert stack is not None
    assert not stack.is_watched(), parallel


def test_one_rank_reads_all_rows_and_shards_them(config, model, alone) -> None:  # type: ignore[no-untyped-def]
    sharded = models.load_model(str(MODEL), config=config, dtype=torch.float32, device=CPU, parallel=alone)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    assert all(
        torch.equal(tensor, full_tensor(sharded.state_dict()[name])) for name, tensor in model.state_dict().items()
    )
    assert not any(tensor.is_meta for tensor in sharded.buffers())
    ids = torch.arange(8)[None]
    assert torch.equal(sharded(input_ids=ids).logits, model(input_ids=ids).logits)


def test_an_older_transformers_is_named_before_anything_is_read(config, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sharded_loading, "NEEDED", (99, 0))
    pair = Parallel(0, 2, cast(Any, "a mesh"))
    with pytest.raises(models.ModelError, match=r"takes transformers 99\.0 or newer, and this is 5\."):
        models.load_model("nowhere", config=config, dtype=torch.float32, device=CPU, parallel=pair)


def test_every_rank_reads_all_of_quantized_files_whose_scales_are_of_blocks_of_rows(
    config, model, monkeypatch, caplog
) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(sharded_loading, "_load_whole", lambda *given: (model, {}))
    choices = {"config": config, "trust_remote_code": False, "quantization_config": object()}
    pair = Parallel(0, 2, cast(Any, "a mesh"))
    found, _ = sharded_loading.load_sharded(model_family(config), "m", pair, Shard(), choices)
    assert found is model
    assert "m: every rank reads all of it, since loading mixes rows (its files are quantized" in caplog.text


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (
            {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration.Own"}},
            "code of its own.*trust_remote_code",
        ),
        ({"model_type": "nothing"}, "cannot read its config.json .*model type `nothing`"),
        ({"model_type": "qwen2", "hidden_size": "x"}, "cannot read its config.json .*hidden_size"),
    ],
)
def test_a_configuration_that_transformers_does_not_read_is_one_sentence(
    written: dict[str, object], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(models.ModelError, match=said) as caught:
        models.load_config(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "mixes"),
    [("qwen3_moe", None), ("mixtral", None), ("qwen2", None),
     ("hrm_text", "Chunk of")],
)  # fmt: skip
def test_families_whose_loader_mixes_rows_are_known(kind, mixes) -> None:  # type: ignore[no-untyped-def]
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **TINY))
    found = sharded_loading.find_row_mixing(empty)
    assert found is None if mixes is None else re.match(mixes, str(found))


def test_a_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    small = Qwen2Config(**{name: value for name, value in TINY.items() if "expert" not in name})
    Qwen2ForCausalLM(small).save_pretrained(tmp_path)
    wide = models.load_config(str(tmp_path), overrides={"vocab_size": 33})
    with pytest.raises(models.ModelError, match=r"of another shape: .*lm_head\.weight"):
        models.load_model(str(tmp_path), config=wide, dtype=torch.float32, device=CPU)
