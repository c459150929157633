"""Make the data and the warm-started model of this example, beside this script (or in `--output`).

    python examples/look/prepare.py

The rows are the quickstart's, with a grey cover in place of each picture; column `picture` holds the picture for the
environment. The model is the quickstart's after a short warm start on the form alone: half of its lessons look and then
answer, half answer at once. What they answer is a guess, so that only GRPO can find out what looking is good for.
"""

import argparse
import base64
import random
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from environment import CALL, COVER
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

HERE = Path(__file__).parent
QUICKSTART = HERE.parent / "quickstart"
sys.path.insert(0, str(QUICKSTART))
from make_data import BACKGROUNDS, FAMILIES, MAX_COUNT, QUESTIONS, draw_picture, encode_png, place_shapes  # noqa: E402

COVER_SIDE = 56  # pixels: 4 tokens
STEPS, LESSONS = 150, 24  # of the warm start, and lessons in each
SEED = 5


def cover() -> Image.Image:
    return Image.new("RGB", (COVER_SIDE, COVER_SIDE), COVER)


def write_rows(rows: list[dict[str, object]], path: Path) -> None:
    """Write the quickstart's rows with covers for pictures."""
    content = encode_png(cover())
    covered = [
        {
            "images": [{"bytes": content, "path": "cover.png"}],
            "problem": row["problem"],
            "answer": row["answer"],
            "picture": base64.b64encode(row["images"][0]["bytes"]).decode(),
        }
        for row in rows
    ]
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    columns = [("images", pa.list_(image)), *((name, pa.string()) for name in ("problem", "answer", "picture"))]
    pq.write_table(pa.Table.from_pylist(covered, schema=pa.schema(columns)), path, compression="zstd")


def draw_lesson(rng: random.Random, number: int) -> tuple[list[Image.Image], list[dict[str, object]]]:
    """Draw a conversation. Of those that look, half show discs with the right answer, as the quickstart's lessons."""
    looks = number % 2 == 0
    family = "disc" if number % 4 == 0 else rng.choice(FAMILIES)
    count = rng.randint(1, MAX_COUNT)
    picture = draw_picture(place_shapes(rng, count, family), rng.choice(BACKGROUNDS))
    taught = count if family == "disc" else rng.randint(1, MAX_COUNT)
    question = [{"type": "image"}, {"type": "text", "text": rng.choice(QUESTIONS)}]
    answer = {"role": "assistant", "content": f"<think>{'*' * taught}</think>\\boxed{{{taught}}}"}
    if not looks:
        return [cover()], [{"role": "user", "content": question}, answer]
    look = [{"role": "assistant", "content": CALL}, {"role": "user", "content": [{"type": "image"}]}]
    return [cover(), picture], [{"role": "user", "content": question}, *look, answer]


def collate(processor: object, lessons: list[tuple[list[Image.Image], list[dict[str, object]]]]) -> dict[str, Tensor]:
    """Render lessons as one batch; labels are -100 outside of the assistant's turns."""
    texts = [processor.apply_chat_template(messages).removesuffix("\n") for _, messages in lessons]
    pictures = [picture for shown, _ in lessons for picture in shown]
    batch = dict(processor(text=texts, images=pictures, padding=True, padding_side="right", return_tensors="pt"))
    tokenizer = processor.tokenizer
    opening = tokenizer("<|im_start|>assistant\n").input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, tokens in enumerate(batch["input_ids"].tolist()):
        for at in range(len(tokens) - len(opening)):
            if tokens[at : at + len(opening)] == opening:
                begin = at + len(opening)
                stop = tokens.index(end, begin) + 1
                labels[row, begin:stop] = batch["input_ids"][row, begin:stop]
    return batch | {"labels": labels}


def warm_start(folder: Path) -> None:
    """Teach the quickstart's model to look, or not to, before it answers."""
    torch.manual_seed(SEED)
    processor = AutoProcessor.from_pretrained(QUICKSTART / "model")
    model = AutoModelForImageTextToText.from_pretrained(QUICKSTART / "model", dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / STEPS))
    rng = random.Random(SEED)
    for step in range(STEPS):
        batch = collate(processor, [draw_lesson(rng, number) for number in range(LESSONS)])
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 25 == 24:
            print(f"warm start: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
    shutil.copytree(QUICKSTART / "model", folder, dirs_exist_ok=True)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the rows and the model")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        rows = pq.read_table(QUICKSTART / f"{name}.parquet").to_pylist()
        write_rows(rows, arguments.output / f"{name}.parquet")
    warm_start(arguments.output / "model")


if __name__ == "__main__":
    main()
