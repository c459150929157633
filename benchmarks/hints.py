"""Why a teacher that is told another row's answer teaches anything: what it says under each hint.

uv run python benchmarks/hints.py FOLDER/start-N/global_step_60/actor … [--every 3]

Reads models that `distillation.py --hint` fine-tuned. For each validation row of the quickstart: the log-probs of the
four well-formed answers, without a hint and with each of the hints 1 to 4. Prints how often an answer drawn from these
four is right. A hint by lot, h, pulls a student towards the geometric mean of what its teacher says under the hints:
the mean over h of KL(π, ν_h) is KL(π, their geometric mean) plus a constant. `well-formed` is the probability of the
four answers together, without a hint.
"""

import argparse
import io
from typing import Any

import pyarrow.parquet as pq
import torch
from distillation import HINT, VALIDATION
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

COUNTS = (1, 2, 3, 4)
HEAD = ("model", "well-formed", "no hint", "the right hint", "a wrong hint", "geometric mean over hints")


def score_answers(model: Any, processor: Any, question: str, picture: Image.Image) -> Tensor:
    """Return the log-probs of the answers [5, 4]: without a hint, and with each of four."""
    hinted = [HINT.replace("{{ content }}", question).replace("{{ COLUMN }}", str(count)) for count in COUNTS]
    prompts = []
    for text in (question, *hinted):
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}
        prompts.append(processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    answers = [f"<think>{'*' * count}</think>\\boxed{{{count}}}<|im_end|>" for count in COUNTS]
    texts = [prompt + answer for prompt in prompts for answer in answers]
    inputs = processor(
        text=texts, images=[picture] * len(texts), padding=True, padding_side="right", return_tensors="pt"
    )
    logprobs = model(**inputs).logits[:, :-1].log_softmax(-1)
    logprobs = logprobs.gather(-1, inputs["input_ids"][:, 1:, None])[..., 0]
    ends = inputs["attention_mask"].sum(-1) - 1
    lengths = torch.tensor([len(processor.tokenizer(answer)["input_ids"]) for answer in answers]).repeat(len(prompts))
    places = torch.arange(logprobs.shape[1])
    of_answer = (places < ends[:, None]) & (places >= (ends - lengths)[:, None])
    return (logprobs * of_answer).sum(-1).view(len(prompts), len(answers))


@torch.no_grad()
def measure(path: str, every: int) -> list[float]:
    """Return the mean of each column of the table over every n-th row of validation."""
    model = AutoModelForImageTextToText.from_pretrained(path).float().eval()
    processor = AutoProcessor.from_pretrained(path)
    rows = []
    for row in pq.read_table(VALIDATION).to_pylist()[::every]:
        picture = Image.open(io.BytesIO(row["images"][0]["bytes"])).convert("RGB")
        question, right = row["problem"].removeprefix("<image>"), int(row["answer"]) - 1
        found = score_answers(model, processor, question, picture)
        plain, hinted = found[0].softmax(-1)[right], found[1:].softmax(-1)[:, right]
        wrong = (hinted.sum() - hinted[right]) / (len(COUNTS) - 1)
        mean = found[1:].log_softmax(-1).mean(0).softmax(-1)[right]
        rows.append(torch.stack([found[0].exp().sum(), plain, hinted[right], wrong, mean]))
    means: list[float] = torch.stack(rows).mean(0).tolist()
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--every", type=int, default=1, help="read every n-th row")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    for path in arguments.models:
        print(f"| {path} | {' | '.join(f'{value:.3f}' for value in measure(path, arguments.every))} |", flush=True)


if __name__ == "__main__":
    main()
