"""Two steps of `r1 train` with a tiny random model, as a user types the command."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from r1_cli.plan.check.device_steps import VOCABULARY, make_model

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16"}
STEPS = 2


def check_run(device: torch.device, dtype: torch.dtype, engine: str, devices: int = 1) -> tuple[Tensor, Tensor]:
    """Train for two steps; return the probabilities of answers by engines as shares of those by the learner, and 1.

    Engine and learner offload for one another between phases. `r1 train` compares the engine's weights after each sync.

    Raises RuntimeError with what the command said, if it fails.
    """
    with TemporaryDirectory() as place:
        folder, run = Path(place), Path(place, "run")
        write_model(folder / "model")
        rows = [json.dumps({"problem": f"{number} {number + 1}", "answer": str(number)}) for number in range(8)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        precision = PRECISIONS[dtype]
        command = [
            sys.executable, "-m", "r1_cli.main", "train", f"worker.actor.model.model_path={folder}/model",
            f"data.train_files={folder}/rows.jsonl", "data.val_files=null", "data.format_prompt=null",
            "data.prompt_key=problem", "data.answer_key=answer", "data.max_prompt_length=16",
            "data.max_response_length=24", "data.rollout_batch_size=4", "data.filter_overlong_prompts_workers=1",
            "worker.actor.global_batch_size=4", "worker.rollout.n=4", "worker.reward.reward_function=math",
            f"worker.rollout.name={engine}", f"worker.rollout.dtype={precision}",
            "worker.rollout.tensor_parallel_size=1", "worker.rollout.gpu_memory_utilization=0.3",
            f"worker.actor.fsdp.mp_param_dtype={precision}", "algorithm.disable_kl=false",
            f"trainer.n_gpus_per_node={devices}", f"trainer.max_steps={STEPS}", "trainer.save_freq=-1",
            "trainer.val_freq=-1", "trainer.max_idle_steps=0", "trainer.logger=[file]",
            f"trainer.save_checkpoint_path={run}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        log = run / "experiment_log.jsonl"
        records = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []
        if done.returncode or len(records) < STEPS:
            said = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
            raise RuntimeError(f"`r1 train` ended with exit code {done.returncode}: {said}")
    gaps = torch.tensor([record["rollout/logprob_gap_mean"] for record in records])
    return gaps.exp(), torch.ones(len(gaps), dtype=torch.float64)


def write_model(folder: Path) -> None:
    """Write a tiny random model with a tokenizer of one token a word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<end>": 0, "?": 1} | {str(n): n + 2 for n in range(VOCABULARY - 2)}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>", unk_token="?")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    make_model(torch.float32).save_pretrained(folder)
