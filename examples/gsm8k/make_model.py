"""A tiny Qwen2 text model with random weights, to try the GSM8K recipe without a download or a GPU.

    python examples/gsm8k/make_model.py OUTPUT_FOLDER

About half a million parameters and one token per byte. It answers nonsense and is not meant to learn arithmetic: it
shows that rows, rewards and updates work before a real model takes its place.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with one token per byte, so that any text survives the round trip."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[], eos_token=END, pad_token=PAD, unk_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": [PAD, START, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Make the model: three layers, 128 wide, four heads of 32."""
    end, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=[end, pad], pad_token_id=pad)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    print(f"{arguments.output}: {sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main()
