"""What it costs to append a tool's answer to an episode, compared with rendering the whole conversation again.

uv run python benchmarks/turns.py [--tokens 1024 8192 32768] [--runs 200]

The episode has a history of that many tokens, in turns of a call and a result. Timed are the continuation behind one
more turn, and laying its positions behind the history's (`append_positions`; `mrope` on four axes). The peer renders
the conversation with the chat template and tokenizes all of it, as a server does at every turn, with the same tokenizer
of byte pairs, learned from this repository's pages. Times are medians. The last line is one JSON object.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from r1_data import Renderer
from r1_data.turns import TurnRenderer, append_positions, probe_template

ROOT = Path(__file__).resolve().parents[1]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CALL = 'I look at the rows.\n<tool_call>\n{"name": "search", "arguments": {"query": "how many rows"}}\n</tool_call>'
RESULT = "Row %d of the table holds the number of rows that were read, and the file that each of them came from. " * 3
QUESTION = {"role": "user", "content": "How many rows were read?"}


def make_renderer() -> Renderer:
    bpe = ByteLevelBPETokenizer()
    pages = list(map(str, ROOT.glob("**/*.md")))
    bpe.train(pages, vocab_size=16_000, special_tokens=[PAD, START, END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=PAD)
    return Renderer(tokenizer, chat_template=TEMPLATE)


def make_history(renderer: Renderer, tokens: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [QUESTION]
    count = 0
    while count < tokens:
        turn = [{"role": "assistant", "content": CALL}, result(len(messages))]
        count += len(renderer.tokenizer(renderer.write_chat(turn, generation_prompt=False))["input_ids"])
        messages += turn
    return messages


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "name": "search", "tool_call_id": "call00000", "content": RESULT % (number, 1, 2)}


def median_ms(run: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs + 5):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[5:]) * 1000


def compare(renderer: Renderer, turns: TurnRenderer, tokens: int, runs: int) -> dict[str, float]:
    history = make_history(renderer, tokens)
    encode = renderer.tokenizer
    before = encode(renderer.write_chat(history), add_special_tokens=False)["input_ids"]
    turn = [*encode(CALL, add_special_tokens=False)["input_ids"], encode.eos_token_id]
    answer, positions = result(0), torch.arange(len(before) + len(turn))[None]
    whole = [*history, {"role": "assistant", "content": CALL}, answer]

    def render_whole() -> list[int]:
        token_ids: list[int] = encode(renderer.write_chat(whole), add_special_tokens=False)["input_ids"]
        return token_ids

    found = turns.continuation(turn, [answer], closed=True)
    assert [*before, *turn, *found.token_ids] == render_whole()
    continued = median_ms(lambda: turns.continuation(turn, [answer], closed=True), runs)
    appended = median_ms(lambda: append_positions(positions, found.position_ids), runs)
    four = positions.expand(4, -1).contiguous()
    appended_four = median_ms(lambda: append_positions(four, found.position_ids.expand(4, -1)), runs)
    rendered = median_ms(render_whole, max(runs // 20, 3))
    return {
        "history": len(before),
        "continuation_ms": continued,
        "positions_ms": appended,
        "positions_mrope_ms": appended_four,
        "whole_ms": rendered,
        "whole_to_continuation": rendered / (continued + appended),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--runs", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    renderer = make_renderer()
    turns = TurnRenderer(renderer, probe_template(renderer))
    rows = [compare(renderer, turns, tokens, arguments.runs) for tokens in arguments.tokens]
    for row in rows:
        print("  ".join(f"{name} {value:,.3f}" if value % 1 else f"{name} {value:,.0f}" for name, value in row.items()))
    print(json.dumps({"turns": rows}))


if __name__ == "__main__":
    main()
