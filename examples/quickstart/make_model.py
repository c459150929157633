"""The tiny Qwen2.5-VL of the quickstart: a million parameters, taught the form of an answer and the easy pictures.

    python examples/quickstart/make_model.py

writes a normal Hugging Face folder, `model/` beside this script (or `--output`). Seeds and the thread count are fixed,
so one machine with one set of library versions writes the same bytes again.

The supervised warm start shows two sorts of pictures. Those with discs only carry the right answer. Those of the task
proper, with squares, triangles or a mixture, carry an answer drawn at random: from them the model learns how to answer,
not what. It can therefore count discs, and mostly guesses elsewhere; that is the gap which GRPO closes.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from make_data import BACKGROUNDS, FAMILIES, MAX_COUNT, QUESTIONS, draw_picture, place_shapes
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

END, PAD = "<|im_end|>", "<|endoftext|>"
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SPECIAL_TOKENS = (PAD, "<|im_start|>", END, *VISION_TOKENS)
THINK_TOKENS = ("<think>", "</think>")  # ordinary tokens: a decoded answer shows them
CORPUS = (*QUESTIONS, "user assistant system", r"\boxed{1}", "You are a helpful assistant.")
DISC_SHARE = 0.5  # of the lessons; these carry the right answer
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}

CHAT_TEMPLATE = """\
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{% if message['content'] is string -%}
{{ message['content'] }}
{%- else -%}
{%- for item in message['content'] -%}
{%- if item['type'] == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif item['type'] == 'video' -%}
<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}
{{ item['text'] }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def build_tokenizer(corpus: Sequence[str] = CORPUS, plain_tokens: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Train a byte-level BPE on the few words in use; any other text falls back to bytes and is not lost.

    `plain_tokens` are further tokens that a decoded answer shows.
    """
    sketch = Tokenizer(models.BPE())
    sketch.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    sketch.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    sketch.train_from_iterator(corpus, trainer)
    merges = [tuple(pair) for pair in json.loads(sketch.to_str())["model"]["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=sketch.get_vocab(), merges=merges, eos_token=END, pad_token=PAD, unk_token=PAD)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS)})
    tokenizer.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in (*THINK_TOKENS, *plain_tokens)]
    )
    return tokenizer


def build_processor() -> Qwen2_5_VLProcessor:
    """Put tokenizer, picture processors and chat template together, as a Qwen2.5-VL folder has them."""
    shape = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": PIXELS}
    pictures, videos = Qwen2VLImageProcessor(**shape), Qwen2VLVideoProcessor(**shape)
    return Qwen2_5_VLProcessor(pictures, build_tokenizer(), videos, chat_template=CHAT_TEMPLATE)


def build_model(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Make the model with random weights: four text layers and two vision layers, all 96 wide, heads of 32."""
    ids = dict(zip(VISION_TOKENS, tokenizer.convert_tokens_to_ids(list(VISION_TOKENS)), strict=True))
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.convert_tokens_to_ids(END),
        "pad_token_id": tokenizer.convert_tokens_to_ids(PAD),
    }
    vision = {
        "depth": 2,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_heads": 3,
        "out_hidden_size": 96,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    end = [tokenizer.convert_tokens_to_ids(token) for token in (END, PAD)]
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=end[1])
    return model


def draw_lesson(rng: random.Random) -> tuple[Image.Image, str, str]:
    """Draw a picture; return it with a question and the answer to teach: the right one for discs, else a guess."""
    count, family = rng.randint(1, MAX_COUNT), "disc" if rng.random() < DISC_SHARE else rng.choice(FAMILIES)
    shapes = place_shapes(rng, count, family)
    picture = draw_picture(shapes, rng.choice(BACKGROUNDS))
    known = all(shape.kind == "disc" for shape in shapes)
    taught = count if known else rng.randint(1, MAX_COUNT)
    return picture, rng.choice(QUESTIONS), f"<think>{'*' * taught}</think>\\boxed{{{taught}}}"


def collate(processor: Qwen2_5_VLProcessor, lessons: list[tuple[Image.Image, str, str]]) -> dict[str, Tensor]:
    """Render lessons as one batch of model inputs; labels are -100 on the question and on padding."""
    chats, prompts = [], []
    for _, question, answer in lessons:
        content = [{"type": "image"}, {"type": "text", "text": question}]
        prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        prompts.append(len(processor.tokenizer(prompt).input_ids))
        chats.append(prompt + answer + END)
    pictures = [picture for picture, _, _ in lessons]
    batch = dict(processor(text=chats, images=pictures, padding=True, padding_side="right", return_tensors="pt"))
    extra = batch["image_grid_thw"].prod(dim=-1) // processor.image_processor.merge_size**2 - 1
    answer_start = (torch.tensor(prompts) + extra)[:, None]
    column = torch.arange(batch["input_ids"].shape[1])
    taught = (column >= answer_start) & batch["attention_mask"].bool()
    batch["labels"] = batch["input_ids"].masked_fill(~taught, -100)
    return batch


def warm_start(
    model: Qwen2_5_VLForConditionalGeneration, processor: Qwen2_5_VLProcessor, steps: int, batch_size: int, seed: int
) -> None:
    """Teach form and discs: AdamW, 30 steps up to a rate of 1.5e-3, then linearly down to zero at `steps`."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min((i + 1) / 30, 1 - i / steps))
    model.train()
    for step in range(1, steps + 1):
        loss = model(**collate(processor, [draw_lesson(rng) for _ in range(batch_size)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def save(model: Qwen2_5_VLForConditionalGeneration, folder: Path) -> None:
    """Write the folder; weights as bfloat16, which halves it, and a processor that no batch has left its padding in."""
    model.to(torch.bfloat16).save_pretrained(folder)
    build_processor().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--steps", type=int, default=2000, help="supervised steps")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(arguments.seed)
    processor = build_processor()
    model = build_model(processor.tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(processor.tokenizer)} tokens")
    warm_start(model, processor, arguments.steps, arguments.batch_size, arguments.seed)
    save(model, arguments.output)


if __name__ == "__main__":
    main()
