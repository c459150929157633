"""Supervised fine-tuning: r1's learner compared with TRL's SFTTrainer, padded and packed.

uv run --isolated --group trl python benchmarks/sft.py [--rounds 5] [--share 0.5]

All sides train the same random Qwen2 in float32 on the same tokenized rows, whose lengths have a long tail; the last
`--share` of each row's tokens is trained. Timed is an epoch of optimizer steps of `--batch` rows (packed by TRL: of as
many packs as hold about as many tokens), from the first step to the last, without tokenization and packing of rows.
TRL has its defaults but for gradient checkpointing and saving, which are off: padded with 8 rows to a micro-batch, its
default, and with 1, which needs no padding; packed by `bfd` into rows of `--pack` tokens. r1 packs micro-batches of
`--pack` tokens. The sides take turns in this process, one thread each; the first round warms up. A ratio is of a side
to r1 within one round: the median, the least and the greatest, of processor seconds (which other work on the machine
changes less) and of seconds. `load` is the machine's before each round.

`leak` is how far the log-probs of trained tokens in TRL's packed rows, and in r1's, are from those of each row alone,
in nats: TRL's packing asks for FlashAttention, which processors do not have. `uncut` is the same of TRL's packed rows
if nothing told their rows apart, to see what a leak would be. `loss` is each side's of the first epoch; TRL shuffles.
The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from r1_cli.models.attention import attend_packed
from r1_core import Batching, Learner, MicroLimit, Objective, Sample, build_optimizer
from r1_core.losses import NLL

VOCAB, PAD = 4096, 0
RATE = 1e-4
Took = tuple[float, float, float]  # processor seconds, seconds, and the mean loss of an epoch
Run = Callable[[], Took]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=1, pad_token_id=PAD, attn_implementation="sdpa",
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_rows(count: int, longest: int) -> list[list[int]]:
    """Rows of random tokens, half of them shorter than an eighth of the longest."""
    generator = torch.Generator().manual_seed(1)
    lengths = (longest / 8 * torch.exp(0.9 * torch.randn(count, generator=generator))).clamp(16, longest).int()
    return [torch.randint(2, VOCAB, (int(n),), generator=generator).tolist() for n in lengths]


def prompt_length(row: list[int], share: float) -> int:
    """At least one token is not trained: nothing predicts the first."""
    return max(1, round(len(row) * (1 - share)))


# --- r1 ---------------------------------------------------------------------------------------------------------------


def to_sample(row: list[int], share: float, number: int) -> Sample:
    mask = torch.arange(len(row)) >= prompt_length(row, share)
    positions = torch.arange(len(row))[None]
    return Sample(torch.tensor(row), mask, positions, number, 0.0, advantages=mask.float())


def make_learner(options: argparse.Namespace) -> Learner:
    model = copy.deepcopy(make_model())
    attend_packed(model)
    optimizer = build_optimizer(model.named_parameters(), lr=RATE)
    limit = MicroLimit(tokens=options.pack)
    return Learner(model, optimizer, lambda step: 1.0, batching=Batching(True, limit, limit))


def make_r1(options: argparse.Namespace, rows: list[list[int]]) -> Run:
    learner, objective = make_learner(options), Objective(NLL())
    samples = [to_sample(row, options.share, number) for number, row in enumerate(rows)]

    def train() -> Took:
        begin, losses = (time.process_time(), time.perf_counter()), []
        for start in range(0, len(samples), options.batch):
            _, metrics = learner.forward_backward_on_policy(samples[start : start + options.batch], objective)
            losses.append(metrics["nll"])
            learner.optim_step()
        return time.process_time() - begin[0], time.perf_counter() - begin[1], statistics.mean(losses)

    return train


# --- TRL --------------------------------------------------------------------------------------------------------------


class Clock(TrainerCallback):
    """Times from the begin of the first step to the end of the last."""

    def __init__(self) -> None:
        self.begin = self.end = (0.0, 0.0)

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 0:
            self.begin = time.process_time(), time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.end = time.process_time(), time.perf_counter()


def make_trainer(options: argparse.Namespace, rows: list[list[int]], folder: str, **settings: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer  # type: ignore[import-not-found,unused-ignore]

    words = {"<pad>": PAD, "<end>": 1, **{f"w{i}": i for i in range(2, VOCAB)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")), pad_token="<pad>", eos_token="<end>"
    )
    masks = [[int(i >= prompt_length(row, options.share)) for i in range(len(row))] for row in rows]
    data = Dataset.from_dict({"input_ids": rows, "completion_mask": masks})
    config = SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, max_length=options.pack,
        num_train_epochs=1, learning_rate=RATE, lr_scheduler_type="constant", completion_only_loss=True,
        logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True, **settings,
    )  # fmt: skip
    return SFTTrainer(make_model(), config, train_dataset=data, processing_class=tokenizer)


def make_trl(trainer: Any, steps: int) -> Run:
    clock = Clock()
    trainer.add_callback(clock)

    def train() -> Took:
        loss = trainer.train().training_loss
        assert trainer.state.global_step == steps
        return clock.end[0] - clock.begin[0], clock.end[1] - clock.begin[1], loss

    return train


# --- leaks ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def logprobs(model: Any, token_ids: torch.Tensor, **more: Any) -> torch.Tensor:
    """Log-probs of a row's tokens but the first, [L − 1]."""
    logits = model(input_ids=token_ids[None], use_cache=False, **more).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, token_ids[1:, None])[:, 0]
    return found


@torch.no_grad()
def enlarge(model: Any) -> Any:
    """Random weights of this size read their context."""
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return model.eval()


def leak_of_trl(trainer: Any, *, uncut: bool = False) -> dict[str, float]:
    """Log-probs in TRL's packed micro-batches against those of each of its rows alone."""
    model, gaps = enlarge(make_model()), []
    for batch in trainer.get_train_dataloader():
        token_ids, positions = batch["input_ids"][0], batch["position_ids"][0]
        more = {"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}
        packed = logprobs(model, token_ids, **({} if uncut else {"position_ids": positions[None], **more}))
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(token_ids)]
        for start, end in pairwise(starts):
            gaps.append((packed[start : end - 1] - logprobs(model, token_ids[start:end])).abs())
    return summary(torch.cat(gaps))


def leak_of_r1(options: argparse.Namespace, rows: list[list[int]]) -> dict[str, float]:
    learner, plain = make_learner(options), enlarge(make_model())
    enlarge(learner.model)
    samples = learner.add_logprobs([to_sample(row, 1.0, i) for i, row in enumerate(rows)], ["old_logprobs"])
    gaps = []
    for sample in samples:
        assert sample.old_logprobs is not None
        gaps.append((sample.old_logprobs[1:] - logprobs(plain, sample.token_ids)).abs())
    return summary(torch.cat(gaps))


def summary(gaps: torch.Tensor) -> dict[str, float]:
    return {"mean": float(f"{gaps.mean():.2g}"), "largest": float(f"{gaps.max():.2g}")}


def compare_rounds(seconds: list[float], of_r1: list[float]) -> dict[str, list[float]]:
    """All rounds, and the median, least and greatest ratio to r1 within a round."""
    ratios = [one / other for one, other in zip(seconds, of_r1, strict=True)]
    found = statistics.median(ratios), min(ratios), max(ratios)
    return {"rounds": [round(one, 2) for one in seconds], "ratio": [round(one, 2) for one in found]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--pack", type=int, default=2048)
    parser.add_argument("--share", type=float, default=0.5)
    options = parser.parse_args()
    import trl  # type: ignore[import-not-found,unused-ignore]

    torch.set_num_threads(1)
    rows = make_rows(options.rows, options.longest)
    total = sum(map(len, rows))
    steps = -(-options.rows // options.batch)
    with tempfile.TemporaryDirectory() as folder:
        of_one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": options.batch}
        of_eight = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": options.batch // 8}
        packs = make_trainer(
            options, rows, folder, packing=True, per_device_train_batch_size=1,
            gradient_accumulation_steps=max(1, round(total / options.pack / steps)),
        )  # fmt: skip
        sides = {
            "r1": make_r1(options, rows),
            "trl padded, 8": make_trl(make_trainer(options, rows, folder, **of_eight), steps),
            "trl padded, 1": make_trl(make_trainer(options, rows, folder, **of_one), steps),
            "trl packed": make_trl(packs, steps),
        }
        times: dict[str, list[Took]] = {name: [] for name in sides}
        losses, loads = dict.fromkeys(sides, 0.0), []
        for number in range(options.rounds + 1):
            loads.append(round(os.getloadavg()[0], 1))
            for name, train in sides.items():
                took = train()
                print(f"round {number}, {name}: {took[0]:.2f} processor s, {took[1]:.2f} s", flush=True)
                if number:
                    times[name].append(took)
                else:
                    losses[name] = round(took[2], 4)
        leaks = {"trl": leak_of_trl(packs), "uncut": leak_of_trl(packs, uncut=True), "r1": leak_of_r1(options, rows)}
    found: dict[str, Any] = {"trl": trl.__version__, "rows": options.rows, "tokens": total, "share": options.share}
    found |= {"steps": steps, "leak": leaks, "loss": losses, "load": loads[1:]}
    for column, word in enumerate(("processor_seconds", "seconds")):
        rounds = {name: [took[column] for took in taken] for name, taken in times.items()}
        found[word] = {name: compare_rounds(taken, rounds["r1"]) for name, taken in rounds.items()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
