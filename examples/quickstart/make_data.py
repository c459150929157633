"""The pictures of the quickstart: draws one to four coloured shapes, asks how many there are, writes two parquet files.

    python examples/quickstart/make_data.py

writes `train.parquet` and `val.parquet` beside this script (or into `--output`), the same bytes on every run. The
columns are those that EasyR1 users know: `images` (a list of {bytes, path}), `problem` and `answer`.

A third of the pictures show squares, a third triangles, and a third a mixture of these and of discs.

The answer cannot be guessed: all four counts are equally frequent, and the words of the question, the kinds of shapes,
their colours and their sizes are drawn without regard to the count. Whoever does not look is right one time in four.
"""

import argparse
import hashlib
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

SIDE = 112  # pixels; 8 × 8 patches of 14, merged 2 × 2: 16 tokens a picture
MAX_COUNT = 4
GAP = 4  # pixels between two shapes, and between a shape and the border
RADII = (8, 13)  # pixels, smallest and largest
KINDS = ("disc", "square", "triangle")
FAMILIES = ("square", "triangle", "mixed")  # a picture shows squares, or triangles, or all kinds of shapes
BACKGROUNDS = ((250, 248, 240), (232, 240, 248), (238, 238, 238))
COLOURS = ((200, 40, 40), (40, 130, 60), (40, 80, 190), (230, 150, 20), (130, 60, 160), (30, 30, 30))
QUESTIONS = ("How many shapes are there?", "How many shapes do you see?", "Count the shapes.")


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: its kind, its centre and radius in pixels, and its colour as RGB."""

    kind: str
    x: int
    y: int
    radius: int
    colour: tuple[int, int, int]


def place_shapes(rng: random.Random, count: int, family: str) -> list[Shape]:
    """Choose `count` shapes of one kind or of mixed kinds, each with its own size and colour, that do not touch."""
    shapes: list[Shape] = []
    while len(shapes) < count:
        radius = rng.randint(*RADII)
        x, y = (rng.randint(radius + GAP, SIDE - 1 - radius - GAP) for _ in range(2))
        if any(math.hypot(x - other.x, y - other.y) < radius + other.radius + GAP for other in shapes):
            continue
        kind = rng.choice(KINDS) if family == "mixed" else family
        shapes.append(Shape(kind, x, y, radius, rng.choice(COLOURS)))
    return shapes


def outline(shape: Shape) -> list[tuple[float, float]]:
    """Return the corners of a square or of a triangle inscribed in the shape's circle, in pixels."""
    corners, turn = (4, math.pi / 4) if shape.kind == "square" else (3, -math.pi / 2)
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    return [(shape.x + shape.radius * math.cos(a), shape.y + shape.radius * math.sin(a)) for a in angles]


def draw_picture(shapes: list[Shape], background: tuple[int, int, int]) -> Image.Image:
    """Paint the shapes flat on the background; an RGB picture of SIDE × SIDE pixels."""
    picture = Image.new("RGB", (SIDE, SIDE), background)
    pen = ImageDraw.Draw(picture)
    for shape in shapes:
        if shape.kind == "disc":
            box = (shape.x - shape.radius, shape.y - shape.radius, shape.x + shape.radius, shape.y + shape.radius)
            pen.ellipse(box, fill=shape.colour)
        else:
            pen.polygon(outline(shape), fill=shape.colour)
    return picture


def encode_png(picture: Image.Image) -> bytes:
    """Return the picture as a small PNG; few flat colours, so the palette loses nothing."""
    buffer = io.BytesIO()
    picture.convert("P", palette=Image.Palette.ADAPTIVE, colors=8).save(buffer, "PNG", optimize=True, bits=4)
    return buffer.getvalue()


def make_rows(rng: random.Random, size: int, seen: set[str]) -> list[dict[str, object]]:
    """Make `size` rows, counts and families in equal shares, without any picture that is already in `seen`."""
    rows: list[dict[str, object]] = []
    while len(rows) < size:
        count, family = len(rows) % MAX_COUNT + 1, FAMILIES[len(rows) // MAX_COUNT % len(FAMILIES)]
        png = encode_png(draw_picture(place_shapes(rng, count, family), rng.choice(BACKGROUNDS)))
        digest = hashlib.sha256(png).hexdigest()
        if digest in seen:
            continue
        seen.add(digest)
        image = {"bytes": png, "path": f"{digest[:12]}.png"}
        rows.append({"images": [image], "problem": "<image>" + rng.choice(QUESTIONS), "answer": str(count)})
    rng.shuffle(rows)
    return rows


def write_rows(rows: list[dict[str, object]], path: Path) -> None:
    """Write rows as one parquet file; PNG is compressed already, so zstd only helps the other columns."""
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("images", pa.list_(image)), ("problem", pa.string()), ("answer", pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), path, compression="zstd", use_dictionary=["problem"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, help="folder for the two files")
    parser.add_argument("--train-rows", type=int, default=3000)
    parser.add_argument("--val-rows", type=int, default=324)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rng, seen = random.Random(arguments.seed), set[str]()
    for name, size in (("train", arguments.train_rows), ("val", arguments.val_rows)):
        path = arguments.output / f"{name}.parquet"
        write_rows(make_rows(rng, size, seen), path)
        print(f"{path}: {size} rows, {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
