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
from transformers import AutoModelForImageTextToText, AutoProcessor

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from warm_start import QUICKSTART, Lesson, warm_start  # noqa: E402, I001  (it finds the quickstart's modules)
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


def draw_lesson(rng: random.Random, number: int) -> Lesson:
    """Draw a conversation. Of those that look, half show discs with the right answer, as the quickstart's lessons."""
    looks = number % 2 == 0
    family = "disc" if number % 4 == 0 else rng.choice(FAMILIES)
    count = rng.randint(1, MAX_COUNT)
    picture = draw_picture(place_shapes(rng, count, family), rng.choice(BACKGROUNDS))
    taught = count if family == "disc" else rng.randint(1, MAX_COUNT)
    question = [{"type": "image"}, {"type": "text", "text": rng.choice(QUESTIONS)}]
    answer = {"role": "assistant", "content": f"<think>{'*' * taught}</think>\\boxed{{{taught}}}"}
    if not looks:
        return Lesson([{"role": "user", "content": question}, answer], [cover()])
    look = [{"role": "assistant", "content": CALL}, {"role": "user", "content": [{"type": "image"}]}]
    return Lesson([{"role": "user", "content": question}, *look, answer], [cover(), picture])


def make_model(folder: Path) -> None:
    """Teach the quickstart's model to look, or not to, before it answers."""
    torch.manual_seed(SEED)
    processor = AutoProcessor.from_pretrained(QUICKSTART / "model")
    model = AutoModelForImageTextToText.from_pretrained(QUICKSTART / "model", dtype=torch.float32)

    def draw_lessons(rng: random.Random, step: int) -> list[Lesson]:
        return [draw_lesson(rng, number) for number in range(LESSONS)]

    warm_start(model, processor, draw_lessons, steps=STEPS, seed=SEED)
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
    make_model(arguments.output / "model")


if __name__ == "__main__":
    main()
