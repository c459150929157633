"""Group sampling: the embedded engine against `transformers` generate, its continuous batching, and vLLM.

uv run python benchmarks/rollout.py [--model tiny|small|vision] [--lengths fixed|tailed] [--tokens 64] [--long N]

Random weights in float32, 64 prompts of 32 to 96 tokens × 8 samples, temperature 1, and the same number of tokens of
each sample in every way: `--tokens` of each (fixed), or a long-tailed mixture with `--tokens` for its longest, of which
four fifths are at most 3/16 of that and one in twenty more than half (tailed). With `--long`, one of the prompts has so
many tokens: what it adds must be its own cost, not that of so long a row for everybody. Each way has a process of its
own, and they take turns; the ratio is of the best turns, once by the clock and once by the processor time of the
process, which other work on the machine disturbs less. The ways:

- `r1`: the embedded engine, which like `vllm` reports log-probs, too;
- `generate`: all 512 rows in one left-padded batch, a stopping criterion of its own for each row;
- `continuous`: `transformers`' continuous batching, one request a sample with its own limit;
- `vllm`: its offline engine, one request a sample with its own limit and prefix caching, if it is installed.

A vision model's prompts have a picture of 112 × 112 each, the same one in every way. All ways run the vision tower in
every turn; none is charged for the processor, which has made tensors of the pictures before the first one.

The limits stand beside the figures: the time that torch's matrix product of such a shape, in its best run here, would
take for the arithmetic of the tokens that are needed, each prompt once; and the time to read the weights once a step,
and each prompt's keys and values once a step and group and each answer's own, at the speed at which it sums a large
tensor.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from rollout_prompts import IMAGE, MEDIA, SIZES, Prompt, make_model, make_processor, make_prompts

SAMPLES = 8
Lengths = list[list[int]]  # [prompts][samples]
Run = Callable[[], int]  # samples everything; returns the tokens that are needed


def make_lengths(kind: str, longest: int, prompts: int) -> Lengths:
    draw = random.Random(2)

    def length() -> int:
        if kind == "fixed":
            return longest
        low, high = draw.choices([(1 / 32, 3 / 16), (3 / 16, 1 / 2), (1 / 2, 1)], [16, 3, 1])[0]
        return max(1, round(longest * draw.uniform(low, high)))

    return [[length() for _ in range(SAMPLES)] for _ in range(prompts)]


def r1(model: Any, prompts: list[Prompt], lengths: Lengths) -> Run:
    from dataclasses import replace

    from r1_rollout.embedded import engine as embedded
    from r1_rollout.types import SamplingParams

    plan = embedded.sampling_strategy

    def scheduled(*args: Any, **options: Any) -> Any:
        """The engine's own plan, but each sample ends at its own length."""

        def stopped(rows: Any) -> torch.Tensor:
            return rows.ages >= torch.tensor([lengths[request.key][sample] for request, sample in rows.owners])

        return replace(plan(*args, **options), stopped=stopped)

    embedded.sampling_strategy = scheduled
    rows = len(prompts) * SAMPLES
    engine = embedded.EmbeddedEngine(
        model,
        end_token_ids=(),
        banned_token_ids=MEDIA if prompts[0].model_inputs else (),
        max_sequences=rows,
        version=0,
    )
    params = SamplingParams(max_tokens=max(map(max, lengths)), n=SAMPLES)
    return lambda: sum(len(c.token_ids) for _, group in engine.generate(prompts, params) for c in group)


def generate(model: Any, prompts: list[Prompt], lengths: Lengths) -> Run:
    from transformers import StoppingCriteria

    width = max(len(prompt.token_ids) for prompt in prompts)
    token_ids = torch.tensor([[0] * (width - len(p.token_ids)) + p.token_ids for p in prompts])
    mask = torch.tensor([[0] * (width - len(p.token_ids)) + [1] * len(p.token_ids) for p in prompts])
    limits = torch.tensor([length for group in lengths for length in group])

    class OwnLimit(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return input_ids.shape[1] - width >= limits

    media = {name: torch.cat([p.model_inputs[name] for p in prompts]) for name in prompts[0].model_inputs}
    if media:
        media["mm_token_type_ids"] = (token_ids == IMAGE).int()

    def run() -> int:
        model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            num_return_sequences=SAMPLES,
            max_new_tokens=int(limits.max()),
            stopping_criteria=[OwnLimit()],
            suppress_tokens=list(MEDIA) if media else None,
            **media,
        )
        return int(limits.sum())

    return run


def continuous(model: Any, prompts: list[Prompt], lengths: Lengths) -> Run:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    if prompts[0].model_inputs:
        raise NotImplementedError("transformers' continuous batching takes token ids alone, no pictures")
    settings = GenerationConfig(do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0, max_new_tokens=4096)
    limits = [(prompt.token_ids, length) for prompt, group in zip(prompts, lengths, strict=True) for length in group]
    # Blocks are counted, for by itself it takes most of the memory that is free.
    batching = ContinuousBatchingConfig(num_blocks=len(limits), max_batch_tokens=len(limits))

    def run() -> int:
        said = 0
        with model.continuous_batching_context_manager(
            generation_config=settings, continuous_batching_config=batching, block=True, timeout=60, warmup=False
        ) as manager:
            for token_ids, length in limits:
                manager.add_request(token_ids, max_new_tokens=length)
            remaining = len(limits)
            while remaining:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise RuntimeError("its thread has died")
                if result is not None and result.is_finished():
                    remaining, said = remaining - 1, said + len(result.generated_tokens)
        return said

    return run


def vllm(model: Any, prompts: list[Prompt], lengths: Lengths) -> Run:
    import os

    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]
    from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found,unused-ignore]

    pictures = prompts[0].picture is not None
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if pictures:
            make_processor().save_pretrained(folder)
        engine = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=not pictures,
            max_model_len=max(len(prompt.token_ids) for prompt in prompts) + max(map(max, lengths)),
            max_num_seqs=len(prompts) * SAMPLES,
            max_num_batched_tokens=8192,
            limit_mm_per_prompt={"image": 1, "video": 0} if pictures else {},
            mm_processor_cache_gb=0,
        )
        rendered = engine.renderer.render_cmpl([_as_vllm_takes_it(prompt) for prompt in prompts])
    if [inputs["prompt_token_ids"] for inputs in rendered] != [prompt.token_ids for prompt in prompts]:
        raise RuntimeError("its processor makes other prompts of these")
    settings = {"ignore_eos": True, "temperature": 1.0, "logprobs": 0, "detokenize": False}
    last = RequestOutputKind.FINAL_ONLY
    requests = [
        (inputs, SamplingParams(max_tokens=length, output_kind=last, **settings))
        for inputs, group in zip(rendered, lengths, strict=True)
        for length in group
    ]

    def run() -> int:
        engine.reset_prefix_cache()
        engine.llm_engine.reset_encoder_cache()
        for number, (inputs, wanted) in enumerate(requests):
            engine.llm_engine.add_request(str(number), inputs, wanted)
        said = 0
        while engine.llm_engine.has_unfinished_requests():
            said += sum(len(output.outputs[0].token_ids) for output in engine.llm_engine.step())
        return said

    return run


def _as_vllm_takes_it(prompt: Prompt) -> dict[str, Any]:
    if prompt.picture is None:
        return {"prompt_token_ids": prompt.token_ids}
    # One placeholder stands for the picture; its processor makes as many of it as there are features.
    once = [*prompt.token_ids[:2], *prompt.token_ids[17:]]
    return {"prompt_token_ids": once, "multi_modal_data": {"image": prompt.picture}}


WAYS = {"r1": r1, "generate": generate, "continuous": continuous, "vllm": vllm}


def serve(options: argparse.Namespace) -> None:
    """Be one way: say when ready, then sample everything once for each line that comes and say how long it took."""
    replies, sys.stdout = sys.stdout, sys.stderr
    model = make_model(options.model)
    prompts = make_prompts(model, options.model, options.prompts, options.long)
    try:
        run = WAYS[options.way](model, prompts, make_lengths(options.lengths, options.tokens, options.prompts))
        print(json.dumps({"threads": torch.get_num_threads()}), file=replies, flush=True)
        for _ in sys.stdin:
            start, cpu = time.perf_counter(), time.process_time()
            tokens = run()
            taken = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps({**taken, "tokens": tokens}), file=replies, flush=True)
    except Exception as error:
        print(json.dumps({"reason": f"{type(error).__name__}: {error}"}), file=replies, flush=True)


class Way:
    """A process for one way of sampling."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", name]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self.child = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, bufsize=1)
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.reason, self.tokens = "", 0
        self.threads = self._read().get("threads")

    def turn(self) -> None:
        if not self.reason:
            assert self.child.stdin is not None
            print(file=self.child.stdin, flush=True)
            reply = self._read()
            if "seconds" in reply:
                self.seconds.append(reply["seconds"])
                self.cpu_seconds.append(reply["cpu_seconds"])
                self.tokens = reply["tokens"]

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"reason": f"it died, status {self.child.wait()}"}
        self.reason = reply.get("reason", "")
        return reply

    def end(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        self.child.wait()


def best(call: Callable[[], Any], runs: int = 20) -> float:
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def limits(name: str, model: Any, prompts: list[Prompt], lengths: Lengths) -> dict[str, float]:
    """Seconds that arithmetic and memory alone would take, see the module's docstring; a vision tower is left out."""
    vocabulary, hidden, inner, layers, heads, kv_heads = SIZES[name]
    size, rows = hidden // heads, len(prompts) * SAMPLES
    left, right, large = torch.randn(rows, hidden), torch.randn(hidden, inner), torch.randn(2**25)
    flops = 2 * rows * hidden * inner / best(lambda: left @ right)
    bandwidth = large.numel() * 4 / best(large.sum, 5)
    body = layers * (hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    arithmetic, kv_read = 0, 0
    for prompt, group in zip(prompts, lengths, strict=True):
        start, longest = len(prompt.token_ids), max(group)
        attended = start * (start + 1) // 2 + sum(n * start + n * (n + 1) // 2 for n in group)
        tokens = start + sum(group)
        arithmetic += 2 * (body * tokens + hidden * vocabulary * sum(group)) + 4 * layers * heads * size * attended
        kv_read += longest * start + sum(n * (n + 1) // 2 for n in group)
    steps = max(map(max, lengths))
    memory = 4 * (sum(p.numel() for p in model.parameters()) * steps + 2 * layers * kv_heads * size * kv_read)
    return {
        "gflops": flops / 1e9,
        "gb_per_second": bandwidth / 1e9,
        "arithmetic_seconds": arithmetic / flops,
        "memory_seconds": memory / bandwidth,
    }


def report(ways: dict[str, Way], bound: dict[str, float]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    ours, ours_cpu = min(ways["r1"].seconds), min(ways["r1"].cpu_seconds)
    for name, way in ways.items():
        if not way.seconds:
            result[name] = {"reason": way.reason}
            continue
        seconds = min(way.seconds)
        limit = max(bound["arithmetic_seconds"], bound["memory_seconds"])
        result[name] = {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(way.tokens / seconds),
            "r1_is_times_as_fast": round(seconds / ours, 2),
            "by_processor_time": round(min(way.cpu_seconds) / ours_cpu, 2),
            "share_of_limit": round(limit / seconds, 3),
        }
    for name, row in result.items():
        print(f"{name:11}", json.dumps(row), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--lengths", choices=["fixed", "tailed"], default="tailed")
    parser.add_argument("--tokens", type=int, default=64, help="the longest answer")
    parser.add_argument("--long", type=int, default=0, help="tokens of the first prompt; 0: as of the others")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="r1 and these")
    parser.add_argument("--way", choices=WAYS, help="for the processes that this one starts")
    options = parser.parse_args()
    if options.way:
        return serve(options)
    model = make_model(options.model)
    prompts = make_prompts(model, options.model, options.prompts, options.long)
    lengths = make_lengths(options.lengths, options.tokens, options.prompts)
    bound = limits(options.model, model, prompts, lengths)
    asked = [name for name in WAYS if name == "r1" or name in options.ways]
    if importlib.util.find_spec("vllm") is None and "vllm" in asked:
        print("vllm        is not installed")
        asked.remove("vllm")
    ways = {name: Way(name) for name in asked}
    for _ in range(options.rounds):
        for way in ways.values():
            way.turn()
    threads = ways["r1"].threads
    for way in ways.values():
        way.end()
    setting = {name: getattr(options, name) for name in ("model", "lengths", "tokens", "long", "prompts")}
    setting |= {"parameters": sum(p.numel() for p in model.parameters()), "samples": SAMPLES, "threads": threads}
    print(json.dumps({"benchmark": "rollout", **setting, **bound, "ways": report(ways, bound)}))


if __name__ == "__main__":
    main()
