"""TRL's GRPOTrainer on the same task, in the settings that are its fastest on a processor.

float32, no gradient checkpointing, no reference (beta 0), no saving, no logging, all answers of a step sampled in one
call of `generate`, or with `paged` by transformers' continuous batching; the loss averaged over all tokens of the step
(`dapo`), as r1's is. An answer's length is forced by a logits processor, in continuous batching by its request.
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset, Image, Sequence, load_dataset  # type: ignore[attr-defined,unused-ignore]
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found,unused-ignore]

from whole_steps.gate import Gate
from whole_steps.task import ANSWERS, Task, load_reward

NEVER = float("-inf")


def serve_task(task: Task, micro: str, *, paged: bool) -> None:
    """Train on a task, `micro` samples a micro-batch."""
    gate = Gate()
    sees = task.kind == "pictures"
    processor = (AutoProcessor if sees else AutoTokenizer).from_pretrained(task.model, padding_side="left")
    model = (AutoModelForImageTextToText if sees else AutoModelForCausalLM).from_pretrained(
        task.model, dtype=torch.float32
    )
    if task.lengths is not None:
        lengths = [length for group in task.lengths for length in group]
        model.generate = ending_at(model.generate, lengths, model.generation_config.eos_token_id)
        model.generate_batch = requests_ending_at(model, lengths)
    parts = task.samples // int(micro)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False, beta=0.0,
            per_device_train_batch_size=int(micro), gradient_accumulation_steps=parts, steps_per_generation=parts,
            num_generations=ANSWERS, max_completion_length=task.tokens, temperature=1.0, top_k=0, top_p=1.0,
            loss_type="dapo", scale_rewards="group", learning_rate=task.rate, lr_scheduler_type="constant",
            optim="adamw_torch_fused", adam_beta1=0.9, adam_beta2=0.95, weight_decay=1e-2, max_grad_norm=1.0,
            max_steps=100_000, logging_strategy="no", save_strategy="no", report_to="none", disable_tqdm=True,
            use_transformers_continuous_batching=paged, shuffle_dataset=True, seed=1,
            transformers_continuous_batching_config=_blocks(task) if paged else None,
        )  # fmt: skip
        clock = Clock(gate)
        reward = clock.timed("rewards", judge(task.reward, clock))
        reward.__name__ = "reward"
        trainer = GRPOTrainer(model, reward, settings, make_rows(task), processing_class=processor, callbacks=[clock])
        trainer._generate_single_turn = clock.timed("sampling", trainer._generate_single_turn)
        trainer._prepare_inputs = clock.timed("prepared", trainer._prepare_inputs)
        trainer.training_step = clock.timed("trained", trainer.training_step)
        trainer.train()


def make_rows(task: Task) -> Dataset:
    """The rows in TRL's format, pictures decoded when they are read."""
    if task.kind != "pictures":
        rows = load_dataset("json", data_files=task.rows, split="train")
        return rows.map(lambda row: {"prompt": [{"role": "user", "content": row["problem"]}]})
    rows = load_dataset("parquet", data_files=task.rows, split="train").cast_column("images", Sequence(Image()))

    def ask(row: dict[str, Any]) -> dict[str, Any]:
        words = {"type": "text", "text": row["problem"].removeprefix("<image>")}
        return {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}, words]}]}

    return rows.map(ask, remove_columns=["problem"])


def judge(file: str, clock: "Clock") -> Callable[..., list[float]]:
    """The task's reward, as TRL calls one."""
    compute_score = load_reward(file)

    def reward(completions: Any, answer: list[str], completion_ids: list[list[int]], **others: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        texts = [text if isinstance(text, str) else text[0]["text"] for text in texts]
        pairs = zip(texts, answer, strict=True)
        found = [one["overall"] for one in compute_score([{"response": r, "ground_truth": g} for r, g in pairs])]
        clock.facts = {
            "tokens": sum(map(len, completion_ids)) / len(completion_ids),
            "reward": sum(found) / len(found),
        }
        return found

    return reward


class Clock(TrainerCallback):
    """Tells the gate of every step, and in which phases its seconds went."""

    def __init__(self, gate: Gate) -> None:
        self.gate, self.seconds, self.facts = gate, dict[str, float](), dict[str, float]()
        self._step = 0.0

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def inside(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

        return inside

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self.gate.open()

    def on_pre_optimizer_step(self, *args: Any, **options: Any) -> None:
        self._step = time.perf_counter()

    def on_optimizer_step(self, *args: Any, **options: Any) -> None:
        self.seconds["optimizer"] = time.perf_counter() - self._step

    def on_step_end(self, *args: Any, **options: Any) -> None:
        spent = self.seconds
        update = spent["trained"] - spent["prepared"] + spent["optimizer"]
        phases = {"sampling": spent["sampling"], "rewards": spent["rewards"], "update": update}
        self.seconds = {}
        self.gate.passed(phases=phases, **self.facts)


# --- answers of given lengths -----------------------------------------------------------------------------------------


def ending_at(generate: Callable[..., Any], lengths: list[int], end: int) -> Callable[..., Any]:
    """`generate`, but row i says its end token at its own length and not before."""
    limits = torch.tensor(lengths)

    def inside(input_ids: torch.Tensor, **options: Any) -> Any:
        width = input_ids.shape[1]

        def force(said: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last = said.shape[1] - width + 1 == limits
            scores[:, end] = NEVER
            scores[last] = NEVER
            scores[last, end] = 0.0
            return scores

        return generate(input_ids=input_ids, logits_processor=[force], **options)

    return inside


def _blocks(task: Task) -> dict[str, int]:
    """Blocks are counted, for by itself it takes most of the memory that is free."""
    return {"num_blocks": task.samples * (1 + task.tokens // 128), "max_batch_tokens": task.samples}


def requests_ending_at(model: Any, lengths: list[int]) -> Callable[..., Any]:
    """`generate_batch`, but request i has its own limit."""

    def inside(prompts: list[list[int]], generation_config: Any, continuous_batching_config: Any, **others: Any) -> Any:
        generation_config.eos_token_id = -1
        found: dict[str, Any] = {}
        with model.continuous_batching_context_manager(
            generation_config=generation_config, continuous_batching_config=continuous_batching_config, block=True,
            timeout=60, warmup=False,
        ) as manager:  # fmt: skip
            names = [
                manager.add_request(prompt, max_new_tokens=length)
                for prompt, length in zip(prompts, lengths, strict=True)
            ]
            while len(found) < len(names):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif result is None and not manager.is_running():
                    raise RuntimeError("its thread has died")
        return {name: found[name] for name in names}

    return inside
