"""Records what TRL makes of pairs, for test_core_preference.py: losses, metrics and norms of gradients.

uv run --isolated --group trl python packages/r1-core/tests/core_preference_trl.py

The policy and the reference are `core_models.qwen2(0)` and `qwen2(1)`, their weights times 3, in float32; for `kto`
swapped, because its KL would be 0. `dpo`, `ipo` and `kto` are from `_compute_loss` of TRL's DPOTrainer and
KTOTrainer; `simpo` and `cdpo`, which those lack, from `cpo_loss` of its CPOTrainer (simpo, and sigmoid with label
smoothing), given log-probs by `get_batch_logps` (cdpo: minus the reference's).
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import trl  # type: ignore[import-not-found,unused-ignore]
from core_models import loud, preference_samples, qwen2
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer  # type: ignore[import-not-found,unused-ignore]

from r1_core.preference import mismatch

RECORDS = Path(__file__).with_suffix(".json")
LABELS = [True, False, True, True, False, False]


def batch(samples: list[Any], prefix: str = "") -> dict[str, torch.Tensor]:
    width = max(len(sample.token_ids) for sample in samples)
    padded = {name: torch.zeros(len(samples), width).long() for name in ("input_ids", "attention_mask", "completion")}
    for i, sample in enumerate(samples):
        own = len(sample.token_ids)
        padded["input_ids"][i, :own], padded["attention_mask"][i, :own] = sample.token_ids, 1
        padded["completion"][i, :own] = sample.loss_mask
    padded["completion_mask"] = padded.pop("completion")
    return {f"{prefix}{name}": value for name, value in padded.items()}


def options(folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder, "per_device_train_batch_size": 2, "report_to": "none", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False,
    }  # fmt: skip


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["<pad>", "<end>", "a", "b", "c"])}
    made = Tokenizer(models.WordLevel(words, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def record(trainer: Any, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer._compute_loss(trainer.model, inputs, False)
    loss.backward()
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return {"loss": loss.item(), "grad_norm": norm(trainer.model), "metrics": metrics}


def norm(model: torch.nn.Module) -> float:
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())


def of_dpo(kind: str, beta: float, folder: str) -> dict[str, Any]:
    samples = preference_samples()
    rows = Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": ["c"] * 2})
    config = DPOConfig(**options(folder), loss_type=kind, beta=beta)
    trainer = DPOTrainer(loud(qwen2(0)), loud(qwen2(1)), config, train_dataset=rows, processing_class=tokenizer())
    return record(trainer, batch([*samples[0::2], *samples[1::2]]))


def of_kto(beta: float, folder: str) -> dict[str, Any]:
    samples = preference_samples()
    rows = Dataset.from_dict({"prompt": ["a"] * 2, "completion": ["b", "c"], "label": [True, False]})
    config = KTOConfig(**options(folder), beta=beta, desirable_weight=1.0, undesirable_weight=0.75)
    trainer = KTOTrainer(loud(qwen2(1)), loud(qwen2(0)), config, train_dataset=rows, processing_class=tokenizer())
    inputs = batch(samples) | batch(mismatch(samples), "KL_") | {"label": torch.tensor(LABELS)}
    return record(trainer, inputs)


def of_cpo(kind: str, beta: float, folder: str, **more: float) -> dict[str, Any]:
    samples = preference_samples()
    rows = Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": ["c"] * 2})
    config = CPOConfig(**options(folder), loss_type=kind, beta=beta, **more)
    trainer = CPOTrainer(loud(qwen2(0)), config, train_dataset=rows, processing_class=tokenizer())
    inputs, policy = batch(samples), loud(qwen2(0))
    labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)

    def logps(model: torch.nn.Module) -> torch.Tensor:
        logits = model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
        found: torch.Tensor = trainer.get_batch_logps(logits, labels, average_log_prob=kind == "simpo")
        return found

    found = logps(policy)
    if kind != "simpo":
        with torch.no_grad():
            reference = logps(loud(qwen2(1)))
        found = found - reference
    losses, chosen, rejected = trainer.cpo_loss(found[0::2], found[1::2])
    losses.mean().backward()
    metrics = {
        "rewards/chosen": chosen.mean().item(),
        "rewards/rejected": rejected.mean().item(),
        "rewards/margins": (chosen - rejected).mean().item(),
        "rewards/accuracies": (chosen > rejected).float().mean().item(),
    }
    return {"loss": losses.mean().item(), "grad_norm": norm(policy), "metrics": metrics}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "trl": trl.__version__,
            "how": "written by core_preference_trl.py, which says how",
            "labels": LABELS,
            "dpo": {"settings": {"beta": 0.1}, **of_dpo("sigmoid", 0.1, folder)},
            "ipo": {"settings": {"beta": 0.3}, **of_dpo("ipo", 0.3, folder)},
            "kto": {"settings": {"beta": 0.2, "undesirable_weight": 0.75}, **of_kto(0.2, folder)},
            "simpo": {
                "settings": {"beta": 2.0, "gamma": 0.8},
                **of_cpo("simpo", 2.0, folder, simpo_gamma=0.8, cpo_alpha=0.0),
            },
            "cdpo": {
                "settings": {"beta": 0.1, "label_smoothing": 0.2},
                **of_cpo("sigmoid", 0.1, folder, label_smoothing=0.2),
            },
        }
    RECORDS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(RECORDS.read_text("utf-8"))


if __name__ == "__main__":
    main()
