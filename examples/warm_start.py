"""Warm starts of the tiny models of these examples: supervised lessons that show the form of turns and answers.

`examples/look`, `examples/sums` and `examples/reasoning_gym` use it. What a lesson answers is up to the example; most
answers are drawn at random, so that only training can find out what is right.
"""

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, ProcessorMixin, Qwen2Config, Qwen2ForCausalLM
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

QUICKSTART = Path(__file__).parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from make_model import END, PAD, build_tokenizer  # noqa: E402

Messages = list[dict[str, object]]

# As Qwen2.5's, but of tools it shows the names only, which keeps prompts short.
CHAT_TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@dataclass(frozen=True)
class Lesson:
    """A conversation whose assistant's turns are taught."""

    messages: Messages
    pictures: Sequence[Image.Image] = ()
    tools: Sequence[Mapping[str, object]] = ()


def build_text_model(corpus: Sequence[str], seed: int) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """Return a Qwen2 with random weights, and a tokenizer whose tokens are the words of `corpus` and single digits."""
    tokenizer = build_tokenizer(corpus, plain_tokens=("<tool_call>", "</tool_call>"))
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(seed)
    end = [tokenizer.convert_tokens_to_ids(token) for token in (END, PAD)]
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end[0],
        pad_token_id=end[1],
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=end[1])
    return model, tokenizer


def collate(processor: PreTrainedTokenizerBase | ProcessorMixin, lessons: Sequence[Lesson]) -> dict[str, Tensor]:
    """Render lessons as one batch; labels are -100 outside of the assistant's turns."""
    texts = [
        processor.apply_chat_template(one.messages, tools=list(one.tools) or None, tokenize=False).removesuffix("\n")
        for one in lessons
    ]
    pictures = [picture for one in lessons for picture in one.pictures]
    shown = {"images": pictures} if pictures else {}
    batch = dict(processor(text=texts, **shown, padding=True, padding_side="right", return_tensors="pt"))
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    opening = tokenizer("<|im_start|>assistant\n").input_ids
    end = tokenizer.convert_tokens_to_ids(END)
    labels = torch.full_like(batch["input_ids"], -100)
    for row, tokens in enumerate(batch["input_ids"].tolist()):
        for at in range(len(tokens) - len(opening)):
            if tokens[at : at + len(opening)] == opening:
                begin = at + len(opening)
                stop = tokens.index(end, begin) + 1
                labels[row, begin:stop] = batch["input_ids"][row, begin:stop]
    return batch | {"labels": labels}


def warm_start(
    model: PreTrainedModel,
    processor: PreTrainedTokenizerBase | ProcessorMixin,
    draw_lessons: Callable[[random.Random, int], Sequence[Lesson]],
    *,
    steps: int,
    seed: int,
    learning_rate: float = 1.5e-3,
) -> None:
    """Teach the lessons of each step with AdamW: ten steps up to the rate, then linearly down to zero at `steps`."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / steps))
    rng = random.Random(seed)
    for step in range(1, steps + 1):
        loss = model(**collate(processor, draw_lessons(rng, step))).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % (steps // 6) == 0:
            print(f"warm start: step {step} of {steps}, loss {loss.item():.3f}", flush=True)
