"""A run of `r1 train` on a model of a shape, its weights random and its answers as long as they may be."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu_stages.bench import Bench, Row, Skipped
from gpu_stages.models import TEXT, empty_model, model_config, random_tensor

TOKENIZER = Path("examples/quickstart/model")
SHARD = 4 << 30  # bytes of a file of weights
ROW = {"problem": "How many shapes are there?", "answer": "3"}
SHOWN = {
    "sync s": "timing_s/sync",
    "canary gap": "rollout/canary_gap",
    "sampling s": "timing_s/gen",
    "old log-probs s": "timing_s/old",
    "update s": "timing_s/update_actor",
    "step s": "timing_s/step",
    "learner's peak GB": "perf/max_memory_allocated_gb",
}


def train_shape(bench: Bench, folder: Path, *settings: str, steps: int = 3) -> Row:
    """Train the model of `folder` for a few steps; return what the last one has logged, and the seconds of all.

    Raises Skipped where the command refuses what is asked for, with what it says.
    """
    prompts, answers, length = (4, 2, 8) if bench.tiny else (64, 8, 1024)
    rows = folder.parent / "rows.jsonl"
    rows.write_text("".join(json.dumps(ROW) + "\n" for _ in range(prompts * steps)))
    with tempfile.TemporaryDirectory() as place:
        command = [
            sys.executable, "-m", "r1_cli.main", "train", f"data.train_files={rows}", "data.val_files=null",
            "data.prompt_key=problem", "data.answer_key=answer", "data.format_prompt=null",
            "data.max_prompt_length=64", f"data.max_response_length={length}", f"data.rollout_batch_size={prompts}",
            f"worker.actor.global_batch_size={prompts}", f"worker.actor.model.model_path={folder}",
            f"worker.rollout.n={answers}", "worker.rollout.ignore_eos=true", "worker.reward.reward_function=math",
            f"trainer.max_steps={steps}", "trainer.save_freq=-1", "trainer.val_freq=-1", "trainer.logger=[file]",
            "trainer.max_idle_steps=0", f"trainer.save_checkpoint_path={place}", *settings,
        ]  # fmt: skip
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        taken = time.perf_counter() - start
        print(" ".join(command), done.stdout, done.stderr, sep="\n", flush=True)
        if done.returncode:
            raise Skipped(f"exit {done.returncode}: {' '.join(done.stderr.strip().splitlines()[-3:])}")
        last = json.loads((Path(place) / "experiment_log.jsonl").read_text().splitlines()[-1])
    return {name: last[key] for name, key in SHOWN.items() if key in last} | {"run s": taken}


def write_model(bench: Bench, name: str, folder: Path) -> None:
    """Write a model folder of a text shape, tensor by tensor, with the quickstart's tokenizer."""
    folder.mkdir()
    config = model_config(name)
    config.architectures = ["Qwen2ForCausalLM"]
    config.dtype = "float32" if bench.tiny else "bfloat16"
    config.save_pretrained(folder)
    for file in TOKENIZER.glob("*token*"):
        shutil.copy(file, folder)
    shutil.copy(TOKENIZER / "chat_template.jinja", folder)
    tied, dtype = TEXT[name][-1], torch.float32 if bench.tiny else torch.bfloat16
    part: dict[str, torch.Tensor] = {}
    number, places = 0, dict[str, str]()
    for key, parameter in empty_model(name).named_parameters():
        if tied and key == "lm_head.weight":
            continue
        part[key] = random_tensor(key, parameter.shape, torch.device("cpu")).to(dtype)  # the run needs the whole GPU
        if sum(tensor.nbytes for tensor in part.values()) > SHARD:
            number = _write(part, number, folder, places)
    _write(part, number, folder, places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def _write(part: dict[str, torch.Tensor], number: int, folder: Path, places: dict[str, str]) -> int:
    if part:
        file = f"model-{number:05d}.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
        part.clear()
    return number + 1
