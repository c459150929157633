"""Ask vLLM on processors for every vision-language family whose pictures r1 reads, from tiny random weights.

It starts with other weights, receives these under the learner's names, and its log-probs are compared with the model's
own eager forward of what the processor returns.

python tests/vllm_pictures.py [NAME …]     # in an environment with vLLM; adds what it finds to vllm_pictures.json
"""

import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import picture_families
import torch
from architectures import first_line
from family_prompts import make_learner

from r1_data.positions import count_tokens, position_ids_of
from r1_data.render import Renderer
from r1_rollout.types import SamplingParams
from r1_rollout.weights import LocalWeights

RECORD = Path(__file__).with_name("vllm_pictures.json")
# vLLM's recurrence on processors takes bfloat16 alone, and heads of a published size: see test_engines.
HALF = ("qwen3_5", "qwen3_5_moe", "qwen4_exp")
TOLERANCE = 1e-4  # nats, float32


def ask(name: str, folder: Path) -> str:
    """Return "right", or why vLLM cannot sample from the family with pictures."""
    from r1_rollout.vllm.engine import VllmEngine

    processor, model = picture_families.make_processor(name), picture_families.make_model(name)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    renderer = Renderer(processor, position_ids=position_ids_of(model.config) or count_tokens)
    examples = [picture_families.make_example(sizes) for sizes in picture_families.SIZES]
    prompts = [renderer.render(example) for example in examples]
    learner = make_learner(model)
    options = {"dtype": "float32", "kv_cache_bytes": 1 << 26, "max_model_len": 1024, "max_sequences": 16}
    banned = frozenset([*range(250, 258), *range(259, model.config.get_text_config().vocab_size)])
    engine = VllmEngine.load(
        str(folder), **options, dummy_weights=True, limit_images=2, end_token_ids=[258], banned_token_ids=banned
    )
    try:
        with engine.active(LocalWeights(learner.weights(), 1)):
            groups = dict(engine.generate(prompts, SamplingParams(n=2, max_tokens=6, seed=1)))
    finally:
        engine.close()
    plain = picture_families.make_model(name)
    plain.set_attn_implementation("eager")
    needed, worst = inspect.signature(plain.forward).parameters, 0.0
    for number, (prompt, example) in enumerate(zip(prompts, examples, strict=True)):
        own = picture_families.call_processor(processor, prompt, example, needed)
        for one in groups[number]:
            ids = torch.tensor([*prompt.token_ids, *map(int, one.token_ids)])
            with torch.no_grad():
                logits = picture_families.forward_alone(plain, own, ids)
            gap = torch.as_tensor(one.logprobs) - picture_families.taken(logits, ids, len(prompt.token_ids))
            worst = max(worst, float(gap.abs().max()))
    return "right" if worst <= TOLERANCE else f"its log-probs are off by {worst:.2g}"


def ask_in_a_process(name: str) -> str:
    """As `ask`. vLLM may end its process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        if (process := os.fork()) == 0:
            try:
                answer.write_text(ask(name, Path(folder, "model")), encoding="utf-8")
            except BaseException as error:
                traceback.print_exc()
                answer.write_text(first_line(error).replace(f"{folder}/model: ", ""), encoding="utf-8")  # type: ignore[arg-type]
            os._exit(0)
        os.waitpid(process, 0)
        return answer.read_text(encoding="utf-8") if answer.exists() else "it ended its process"


def main(names: list[str]) -> None:
    from vllm.model_executor.models import registry  # imported once, for all processes

    registry._run_in_subprocess = lambda call: call()  # which would import vLLM again for each architecture

    shown: dict[str, Any] = json.loads(picture_families.RECORD.read_text(encoding="utf-8"))
    for name in names or [name for name, one in shown.items() if one["layout"] and name not in HALF]:
        answer = ask_in_a_process(name)
        print(name, answer, flush=True)
        known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        RECORD.write_text(json.dumps(dict(sorted({**known, name: answer}.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
