"""A model that ranks load in shards equals the model that one process loads."""

import loading_ranks
import pytest
import ranks
import torch
from loading_ranks import folder_of
from safetensors.torch import load_file, save_file
from test_published_models import QUANTIZED, publish

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return folder_of("qwen3_moe", tmp_path_factory.mktemp("moe"))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("qwen2", {"tie_word_embeddings": True}), ("llama", {}), ("qwen3_moe", {}), ("gemma3_text", {}),
     ("qwen2_5_vl", {}), ("qwen3_vl", {}), ("qwen3_vl_moe", {}), ("qwen3_5", {})],
)  # fmt: skip
def test_parts_are_the_whole_to_the_bit(family, settings, tmp_path):
    path = folder_of(family, tmp_path, **settings)
    for dtype in (torch.float32, torch.bfloat16):
        for differing, share, same_logits, tied in ranks.run(loading_ranks.compare, path, dtype):
            assert differing == []
            assert share < 0.6
            assert same_logits
            assert tied == settings.get("tie_word_embeddings", False)


def test_a_family_whose_loader_mixes_rows_is_read_whole_and_shared_then(tmp_path):
    for differing, share, same_logits, _ in ranks.run(loading_ranks.compare, folder_of("olmo_hybrid", tmp_path)):
        assert (differing, same_logits) == ([], True)
        assert share < 0.6


def test_experts_that_the_files_have_the_other_way_round_are_not_turned(tmp_path):
    path = folder_of("qwen3_vl_moe", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    turned = [name for name in weights if ".experts." in name]
    assert len(turned) == 4
    assert {weights[name].ndim for name in turned} == {3}
    weights |= {name: weights[name].transpose(1, 2).contiguous() for name in turned}  # as a checkpoint of r1 has them
    for _ in ("as published", "turned"):
        for differing, share, same_logits, _ in ranks.run(loading_ranks.compare, path):
            assert (differing, same_logits) == ([], True)
            assert share < 0.6
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})


def test_ragged_and_hybrid_shards_and_offloaded_ones_are_read_right(tmp_path):
    path = folder_of("qwen2", tmp_path, hidden_size=66, intermediate_size=97, vocab_size=271)
    for options in ((-1, False), (2, False), (1, False), (-1, True)):
        for differing, share, same_logits, _ in ranks.run(
            loading_ranks.compare, path, torch.float32, *options, world=4
        ):
            assert (differing, same_logits) == ([], True)
            assert share < {-1: 0.3, 2: 0.6, 1: 1.1}[options[0]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_moe"])
def test_a_model_loaded_in_parts_takes_the_steps_of_a_whole_one(family, tmp_path):
    assert max(ranks.run(loading_ranks.step, folder_of(family, tmp_path))) < 1e-5


@pytest.mark.parametrize("family", QUANTIZED)
def test_a_model_published_in_few_bits_takes_the_steps_of_a_whole_one_in_float32(family, tmp_path):
    pack, quantization = QUANTIZED[family]
    packed, _ = pack(publish(family, tmp_path, quantization_config=quantization))
    save_file(packed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert max(ranks.run(loading_ranks.step, str(tmp_path))) < 1e-5


def test_a_missing_weight_is_named_by_every_rank(tmp_path):
    path = folder_of("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for said in ranks.run(loading_ranks.refuse, path):
        assert "1 weights are missing or of another shape: model.layers.1.mlp.up_proj.weight" in said


def test_a_weight_of_another_shape_is_named(tmp_path):
    path = folder_of("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"][:-1]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    said = [text for text in ranks.run(loading_ranks.refuse, path) if text]
    assert said
    assert all("another shape" in text and "model.norm.weight" in text for text in said)


def test_tied_weights_that_the_files_hold_twice_stay_tied_if_they_are_equal(tmp_path):
    path = folder_of("qwen2", tmp_path, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert [found[::3] for found in ranks.run(loading_ranks.compare, path)] == [([], True)] * 2
    weights["lm_head.weight"][3] += 1
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for said in ranks.run(loading_ranks.refuse, path):
        assert "ties weights of which the files hold different values" in said
    assert ranks.run(loading_ranks.refuse, path, {"tie_word_embeddings": False}) == [None, None]


def test_a_rank_without_an_expert_says_what_to_set(moe):
    said = ranks.run(loading_ranks.refuse, moe, world=3)  # four experts: two, two and none
    assert said[:2] == [None, None]
    assert "rank 2 of 3 could not read its rows" in said[2]
    assert "fsdp_size" in said[2]


def test_a_rank_grows_by_its_share_of_the_model(tmp_path):
    """400 MB in float32, kept in files of bfloat16."""
    ranks.end()  # what other cases have allocated would be used again
    path = tmp_path / "model"
    size = {"hidden_size": 1536, "intermediate_size": 6144, "vocab_size": 16_000}
    folder_of("qwen2", path, dtype=torch.bfloat16, **size)
    small = folder_of("qwen2", tmp_path / "small")
    for grown, num_bytes in ranks.run(loading_ranks.measure, str(path), small):
        assert num_bytes > 300e6
        assert grown < num_bytes * (1 / 2 + 0.1)
