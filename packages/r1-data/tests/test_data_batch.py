"""Tests of batches: a model says of each prompt what it says of it alone."""

import pytest
import torch
from data_models import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen2Config

from r1_data import PromptDataset, Renderer, collate


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_vision_language_model_reads_a_batch_as_it_reads_each_prompt(fresh_processor, picture, movie, family):
    processor = fresh_processor(family)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(tiny_config(family, processor)).eval()
    rows = [
        {"prompt": "<image>How many?", "answer": "1", "images": [picture(60, 40)]},
        {"prompt": "What?", "answer": "1"},
        {"prompt": "<video>a<image>b", "answer": "1", "images": [picture(90, 60)], "videos": [movie(64, 48, 8, fps=4)]},
    ]
    dataset = PromptDataset(rows, Renderer(processor, max_pixels=56 * 56 * 4), max_prompt_length=500)
    prompts = [dataset[index] for index in range(3)]
    batch = collate(prompts, processor.tokenizer.pad_token_id)
    with torch.no_grad():
        together = model(**batch).logits
        for row, prompt in enumerate(prompts):
            alone = model(**collate([prompt], 0)).logits[0]
            assert torch.allclose(together[row, -len(alone) :], alone, atol=1e-5)


def test_a_text_model_reads_and_continues_a_batch(tokenizer):
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(Qwen2Config(vocab_size=300, **size, **heads)).eval()
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("Why?", "What is seven times eight?")]
    dataset = PromptDataset(rows, Renderer(tokenizer), max_prompt_length=500)
    prompts = [dataset[0], dataset[1]]
    batch = collate(prompts, tokenizer.pad_token_id)
    assert batch["position_ids"].shape == batch["input_ids"].shape
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(**batch, **settings)[:, batch["input_ids"].shape[1] :]
    for row, prompt in enumerate(prompts):
        alone = model.generate(torch.tensor([prompt.token_ids]), **settings)[0, len(prompt.token_ids) :]
        assert together[row].tolist() == alone.tolist()


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one prompt"):
        collate([], 0)
