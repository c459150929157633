"""A third list of odd inputs: names that are no files, packed and mixed files, columns of every type, odd media."""

import gzip
import io
import json
import os
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from odd_cases import SOUND, Case, Named, Read, Refused, beside, filmed, row, shown, whole
from odd_files import CSV, THREE, column, files, line, parquet, zstd
from odd_media import BLACK, PNG, RED, encode, film, flat, noise
from PIL import Image
from PIL import __version__ as PILLOW
from PIL.PngImagePlugin import PngInfo

SOUND_LINE = json.dumps(SOUND).encode()
# Pillow reads what it writes of this kind since 13; extras of r1-cli allow older ones only.
YCBCR = Read(corner=BLACK) if int(PILLOW.split(".")[0]) >= 13 else Named("cannot be read")


def named(make: Callable[[Path], Any], name: str = "train.jsonl") -> Callable[[Path], str]:
    """What stands in the place of a file."""

    def place(folder: Path) -> str:
        make(folder / name)
        return str(folder / name)

    return place


def among(make: Callable[[Path], Any]) -> Callable[[Path], str]:
    """A folder with a sound file and something else."""

    def place(folder: Path) -> str:
        (folder / "train.jsonl").write_bytes(THREE)
        make(folder)
        return str(folder)

    return place


def table(columns: Mapping[str, pa.Array]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        pq.write_table(pa.table(dict(columns)), folder / "train.parquet")
        return str(folder / "train.parquet")

    return make


def empty_groups(folder: Path) -> str:
    rows = pa.Table.from_pylist([SOUND] * 3)
    with pq.ParquetWriter(folder / "train.parquet", rows.schema) as writer:
        for part in (rows[:0], rows[:1], rows[:0], rows[1:], rows[:0]):
            writer.write_table(part)
    return str(folder / "train.parquet")


def closed_picture() -> Image.Image:
    image = Image.open(io.BytesIO(PNG))
    image.close()
    return image


def chatty_png() -> bytes:
    """A PNG whose text unpacks to more than a reader wants."""
    info = PngInfo()
    info.add_text("note", "x" * 2**22, zip=True)
    return encode(flat(), pnginfo=info)


def names() -> dict[str, Case]:
    return {
        "pipe as a file": Case(named(os.mkfifo), Refused("train.jsonl.*not a file")),
        "device as a file": Case(named(lambda path: path.symlink_to("/dev/zero")), Refused("train.jsonl.*not a file")),
        "link to itself": Case(named(lambda path: path.symlink_to(path)), Refused("train.jsonl")),
        "link to nothing": Case(named(lambda path: path.symlink_to("gone")), Refused("train.jsonl")),
        "name of 300 letters": Case(lambda folder: f"{folder}/{'a' * 300}.jsonl", Refused("a{300}")),
        "name with a zero byte": Case(lambda folder: f"{folder}/a\0.jsonl", Refused("jsonl")),
        "name of nothing": Case(lambda folder: "", Refused("name")),
        "name that is an ending": Case(whole(THREE, ".jsonl"), Refused("jsonl|kind")),
        "name of 200 letters": Case(whole(THREE, "é" * 100 + ".jsonl"), Read(truth="2")),
        "folder with a pipe": Case(among(lambda folder: os.mkfifo(folder / "train-2.jsonl")), Read(truth="2")),
        "folder with a loop": Case(among(lambda folder: (folder / "x").symlink_to(folder)), Read(truth="2")),
        "folder with a link to nothing": Case(
            among(lambda folder: (folder / "train-2.jsonl").symlink_to("gone")), Read(truth="2")
        ),
        "picture that is a pipe": Case(
            lambda folder: (os.mkfifo(folder / "a.png"), row(problem="<image>?", images=["a.png"])(folder))[1],
            Named("not a file"),
        ),
        "picture that is a link to itself": Case(
            lambda folder: ((folder / "a.png").symlink_to("a.png"), row(problem="<image>?", images=["a.png"])(folder))[
                1
            ],
            Named("a.png"),
        ),
        "picture of 300 letters": Case(shown("a" * 300 + ".png"), Named("a{300}")),
        "picture that is a folder": Case(beside({"a.png/x": b""}, "a.png"), Named("not a file")),
        "film that is a pipe": Case(
            lambda folder: (os.mkfifo(folder / "a.mp4"), row(problem="<video>?", videos=["a.mp4"])(folder))[1],
            Named("not a file"),
        ),
    }


def contents() -> dict[str, Case]:
    twice = {**SOUND, "problem": "<image>?", "image": PNG}
    return {
        "byte order mark in every line": Case(whole(b"\n".join([b"\xef\xbb\xbf" + SOUND_LINE] * 3)), Read(truth="2")),
        "utf-16 without a mark": Case(whole(THREE.decode().encode("utf-16-le")), Refused("empty")),
        "utf-32": Case(whole(THREE.decode().encode("utf-32")), Refused("UTF-8")),
        "integer of 400 digits": Case(line(f'{{"problem": "?", "answer": {"9" * 400}}}'), Read(truth="9" * 400)),
        "integer of 5,000 digits beside": Case(
            line(f'{{"problem": "?", "answer": "1", "id": {"9" * 5000}}}'), Named("digits|JSON")
        ),
        "NaN beside": Case(line('{"problem": "?", "answer": "1", "weight": NaN}'), Read(truth="1")),
        "key twice inside": Case(line('{"problem": "?", "answer": "1", "extra": {"a": 1, "a": 2}}'), Named("twice")),
        "empty object": Case(line("{}"), Named("column")),
        "empty array": Case(whole(b"[]", "train.json"), Refused("no rows|empty")),
        "null in an array": Case(whole(json.dumps([SOUND, None, SOUND]).encode(), "train.json"), Named("object")),
        "rows of two formats": Case(line('{"prompt": "?", "reward_model": {"ground_truth": "7"}}'), Read(truth="7")),
        "csv with a nameless column": Case(
            whole(b"problem,answer,\n" + b"a,1,x\n" * 3, "train.csv"), Read(truth="1", metadata={"": "x"})
        ),
        "csv of old mac line ends": Case(
            whole(CSV.format("a,1").replace("\n", "\r").encode(), "train.csv"), Refused("csv")
        ),
        "csv in utf-16": Case(whole(CSV.format("a,1").encode("utf-16"), "train.csv"), Refused("UTF-8")),
        "gzip in two parts": Case(
            whole(gzip.compress(SOUND_LINE + b"\n") + gzip.compress(SOUND_LINE + b"\n") * 2, "train.jsonl.gz"),
            Read(truth="2"),
        ),
        "zstd in two parts": Case(
            whole(zstd(SOUND_LINE + b"\n") + zstd(SOUND_LINE + b"\n") * 2, "train.jsonl.zst"), Read(truth="2")
        ),
        "gzip of gzip": Case(whole(gzip.compress(gzip.compress(THREE)), "train.jsonl.gz"), Refused("gz")),
        "gzip of nothing": Case(whole(gzip.compress(b""), "train.jsonl.gz"), Refused("no rows|empty")),
        "gzip of no bytes": Case(whole(b"", "train.jsonl.gz"), Refused("gz|empty")),
        "tar of gzip": Case(whole(gzip.compress(THREE), "train.tar.gz"), Refused("gz")),
        "picture columns of both names": Case(row(**twice, images=[PNG]), Named("'image' is not read", taken=True)),
        "picture columns of both names, one empty": Case(
            row(problem="?", image=PNG, images=[]), Named("'image' is not read", taken=True)
        ),
        "film columns of both names": Case(
            row(problem="<video>?", video=film(), videos=[film()]), Named("'video' is not read", taken=True)
        ),
        "folder with files of no split": Case(files(("train.jsonl", THREE), ("more.jsonl", THREE)), Read(truth="2")),
    }


def cells() -> dict[str, Case]:
    when = datetime(2026, 1, 2, 3, 4, 5)
    return {
        "truth of a date": Case(column("answer", [date(2026, 1, 2)] * 3, pa.date32()), Read(truth="2026-01-02")),
        "truth of a time stamp": Case(
            column("answer", [when] * 3, pa.timestamp("s")), Read(truth="2026-01-02 03:04:05")
        ),
        "truth of a time": Case(column("answer", [time(3, 4)] * 3, pa.time32("s")), Read(truth="03:04:00")),
        "truth of a duration": Case(
            column("answer", [timedelta(1)] * 3, pa.duration("s")), Read(truth="1 day, 0:00:00")
        ),
        "truth of a large number": Case(column("answer", [2**64 - 1] * 3, pa.uint64()), Read(truth=str(2**64 - 1))),
        "truth of small floats": Case(column("answer", [0.5] * 3, pa.float16()), Read(truth="0.5")),
        "truth of minus zero": Case(column("answer", [-0.0] * 3, pa.float32()), Read(truth="-0.0")),
        "truth of an infinity": Case(column("answer", [1.0, float("-inf"), 1.0], pa.float32()), Named("inf")),
        "truth of a null in a dictionary": Case(
            column("answer", ["1", None, "1"], pa.dictionary(pa.int8(), pa.string())), Named("empty")
        ),
        "truth of nulls": Case(column("answer", [None] * 3, pa.null()), Refused("empty")),
        "truth of a structure": Case(
            column("answer", [{"a": "1", "b": None}] * 3, pa.struct([("a", pa.string()), ("b", pa.int8())])),
            Read(truth='{"a": "1", "b": null}'),
        ),
        "truth of bytes in a structure": Case(
            column("answer", [{"a": b"7"}] * 3, pa.struct([("a", pa.binary())])), Read(truth='{"a": "7"}')
        ),
        "truth of a list with NaN": Case(
            column("answer", [[1.0], [1.0, float("nan")], [1.0]], pa.list_(pa.float64())), Named("nan|not a number")
        ),
        "truth of a map": Case(
            column("answer", [[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())), Read(truth='[["a", 1]]')
        ),
        "truth of structures in a list": Case(
            column("answer", [[{"a": 1}, None]] * 3, pa.list_(pa.struct([("a", pa.int8())]))),
            Read(truth='[{"a": 1}, null]'),
        ),
        "truth of an empty structure": Case(row(answer={}), Named("empty")),
        "truth of a numpy NaN": Case(row(answer=np.float32("nan")), Named("nan|not a number")),
        "truth of a numpy array": Case(row(answer=np.array([1, 2])), Read(truth="[1, 2]")),
        "truth of a tuple": Case(row(answer=("1", 2)), Read(truth='["1", 2]')),
        "truth of bytes in a list that are no text": Case(row(answer=[b"\xff"]), Named("UTF-8")),
        "truth of no time": Case(row(answer=np.datetime64("NaT")), Named("empty")),
        "truth of a decimal NaN": Case(row(answer=Decimal("NaN")), Named("nan|NaN|not a number")),
        "prompts of a dictionary": Case(
            column("problem", ["?", "why", "?"], pa.dictionary(pa.int32(), pa.large_string())), Read("why")
        ),
        "prompts of structures": Case(
            column("problem", [{"text": "?"}] * 3, pa.struct([("text", pa.string())])), Refused("text or a list")
        ),
        "pictures of null": Case(column("images", [None] * 3, pa.null()), Read(truth="1")),
        "pictures with a null among them": Case(
            parquet(
                *[{**SOUND, "problem": "<image>?", "images": [{"bytes": PNG, "path": None}]}] * 1,
                {**SOUND, "problem": "<image><image>?", "images": [{"bytes": PNG, "path": None}, None]},
                {**SOUND, "problem": "<image>?", "images": [{"bytes": PNG, "path": None}]},
            ),
            Named("picture"),
        ),
        "pictures of a fixed number": Case(
            table(
                {
                    "problem": pa.array(["<image><image>?"] * 3),
                    "answer": pa.array(["1"] * 3),
                    "images": pa.array([[PNG, PNG]] * 3, pa.list_(pa.binary(), 2)),
                }
            ),
            Read(pictures=2),
        ),
        "pictures in a list of lists": Case(
            parquet(*[{**SOUND, "problem": "?", "images": [[PNG]]}] * 3), Refused("picture")
        ),
        "messages with null parts": Case(
            parquet(
                *[
                    {
                        "problem": [
                            {
                                "role": "user",
                                "content": [{"type": "image", "text": None}, {"type": "text", "text": "why"}],
                            }
                        ],
                        "answer": "1",
                        "images": [{"bytes": PNG}],
                    }
                ]
                * 3
            ),
            Read("why", pictures=1),
        ),
        "row groups of no rows": Case(empty_groups, Read(truth="2")),
        "columns of one name in two cases": Case(row(Answer="9"), Read(truth="1", metadata={"Answer": "9"})),
    }


def media() -> dict[str, Case]:
    deep = np.zeros((40, 60, 3), np.uint8)
    return {
        "gray JPEG": Case(shown(encode(flat(255, "L"), "JPEG")), Read(corner=(255, 255, 255))),
        "JPEG by steps": Case(shown(encode(flat(), "JPEG", progressive=True, quality=95)), Read(corner=RED)),
        "JPEG with something behind": Case(shown(encode(flat(), "JPEG", quality=95) + b"x" * 500), Read(corner=RED)),
        "PNG with much to say": Case(shown(chatty_png()), Named("cannot be read|too large")),
        "TIFF packed by LZW": Case(shown(encode(flat(), "TIFF", compression="tiff_lzw")), Read(corner=RED)),
        "GIF with transparency": Case(shown(encode(flat(0, "P"), "GIF", transparency=0)), Read(corner=(255, 255, 255))),
        "WebP with transparency": Case(
            shown(encode(flat((0, 0, 0, 0), "RGBA"), "WEBP", lossless=True)), Read(corner=(255, 255, 255))
        ),
        "YCbCr TIFF": Case(shown(encode(Image.fromarray(deep, "RGB").convert("YCbCr"), "TIFF")), YCBCR),
        "PPM": Case(shown(encode(flat(), "PPM")), Read(corner=RED)),
        "picture in memory of half a file": Case(shown(Image.open(io.BytesIO(noise()[:2000]))), Named("truncated|cut")),
        "picture that was closed": Case(shown(closed_picture()), Named("cannot be read|picture")),
        "mapping of no bytes and a path": Case(
            lambda folder: (
                (folder / "a.png").write_bytes(PNG),
                row(problem="<image>?", images=[{"bytes": b"", "path": "a.png"}])(folder),
            )[1],
            Read(corner=RED),
        ),
        "film of one frame": Case(filmed(film(frames=1)), Read(videos=1)),
        "film of two pixels": Case(filmed(film(2, 2)), Read(videos=1)),
        "film and picture": Case(
            row(problem="<video><image>?", videos=[film()], images=[PNG]), Read(videos=1, pictures=1)
        ),
        "film among pictures": Case(
            row(problem="<image><image>?", images=[PNG, film()]), Named("cannot be read|video")
        ),
        "frames of pictures and noise": Case(filmed([PNG, noise(size=(60, 40))]), Read(videos=1)),
        "film and nothing": Case(row(problem="<video><video>?", videos=[film()]), Named("markers")),
    }
