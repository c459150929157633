"""Odd and broken rows, files, pictures, videos and URLs, each with what should become of it.

Written before the code that reads them was looked at. Each case stands between two sound rows where it is a row.
"""

import base64
import gzip
import io
import json
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SOUND = {"problem": "What is 1 + 1?", "answer": "2"}
RED, BLACK = (255, 0, 0), (0, 0, 0)


@dataclass(frozen=True)
class Read:
    """The row is read rightly: these of its facts hold, and nothing is found wrong with it."""

    text: str | None = None  # is in the rendered prompt
    truth: str | None = None
    pictures: int | None = None
    videos: int | None = None
    corner: tuple[int, int, int] | None = None  # about the colour of the first picture's corner
    shape: str | None = None  # "tall" or "wide": the first picture or video
    metadata: Mapping[str, Any] | None = None
    rows: int = 3  # that the source then has


@dataclass(frozen=True)
class Named:
    """The row is named by file and number, in a check and by a data set, and left out; the others are read."""

    pattern: str
    number: int = 2
    rows: int = 3
    taken: bool = False  # a run uses the row all the same, and says so


@dataclass(frozen=True)
class Refused:
    """The source cannot be used; the message names the file."""

    pattern: str


@dataclass(frozen=True)
class Case:
    """What is written, and what should become of it."""

    make: Callable[[Path], Any]  # gives rows in memory, or the path to read
    expect: Read | Named | Refused


def line(text: str | bytes) -> Callable[[Path], str]:
    """A JSON line of this text, between two sound ones."""
    raw = text if isinstance(text, bytes) else text.encode()
    sound = json.dumps(SOUND).encode()
    return whole(b"\n".join([sound, raw, sound]) + b"\n")


def whole(data: bytes, name: str = "train.jsonl") -> Callable[[Path], str]:
    """A file of these bytes."""

    def make(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return str(folder / name)

    return make


def row(**cells: Any) -> Callable[[Path], list[tuple[str, dict[str, Any]]]]:
    """A row in memory, between two sound ones."""
    made = {"problem": "?", "answer": "1", **cells}
    made = {name: cell for name, cell in made.items() if cell is not MISSING}
    return lambda folder: [("t:1", dict(SOUND)), ("t:2", made), ("t:3", dict(SOUND))]


MISSING = object()


def shown(*pictures: Any, problem: str = "<image>?") -> Callable[[Path], Any]:
    return row(problem=problem, images=list(pictures))


def filmed(*videos: Any, problem: str = "<video>?") -> Callable[[Path], Any]:
    return row(problem=problem, videos=list(videos))


def beside(files: Mapping[str, bytes], cell: Any, column: str = "images") -> Callable[[Path], Any]:
    """A row whose picture is a file beside it; `{}` in the cell is the folder."""

    def make(folder: Path) -> Any:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        there = cell.replace("{}", str(folder)) if isinstance(cell, str) else cell
        marker = "<image>" if column == "images" else "<video>"
        return row(problem=f"{marker}?", **{column: [there]})(folder)

    return make


def jsonl(*rows: Mapping[str, Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in rows).encode()


def parquet(*rows: Mapping[str, Any], schema: pa.Schema | None = None, **options: Any) -> Callable[[Path], str]:
    """A parquet file of these rows."""

    def make(folder: Path) -> str:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), folder / "train.parquet", **options)
        return str(folder / "train.parquet")

    return make


def column(name: str, cells: list[Any], kind: pa.DataType, **options: Any) -> Callable[[Path], str]:
    """A parquet file of three rows in which one column has this type."""

    def make(folder: Path) -> str:
        columns = {"problem": pa.array(["?", "?", "?"]), "answer": pa.array(["1", "1", "1"])}
        columns[name] = pa.array(cells, kind)
        pq.write_table(pa.table(columns), folder / "train.parquet", **options)
        return str(folder / "train.parquet")

    return make


def broken_page(folder: Path) -> str:
    """Three row groups of a row each, the middle one's data overwritten."""
    path = folder / "train.parquet"
    rows = [dict(SOUND, problem=f"{index}: " + "word " * 400) for index in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=1, compression="zstd", use_dictionary=False)
    meta = pq.read_metadata(path).row_group(1).column(0)
    start, length = meta.data_page_offset, meta.total_compressed_size
    data = bytearray(path.read_bytes())
    data[start : start + length] = b"\xff" * length
    path.write_bytes(bytes(data))
    return str(path)


def twice_named(folder: Path) -> str:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["1"]), pa.array(["2"])], ["problem", "answer", "answer"])
    pq.write_table(table, folder / "train.parquet")
    return str(folder / "train.parquet")


def files(*named: tuple[str, bytes], read: str = "") -> Callable[[Path], str]:
    """Several files in a folder, of which the folder, or one, is read."""

    def make(folder: Path) -> str:
        for name, data in named:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return f"{folder}/{read}" if read else str(folder)

    return make


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def noise(kind: str = "PNG", size: tuple[int, int] = (120, 90), **options: Any) -> bytes:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return encode(Image.fromarray(values), kind, **options)


def flat(colour: Any = RED, mode: str = "RGB", size: tuple[int, int] = (60, 40)) -> Image.Image:
    return Image.new(mode, size, colour)


def drawing(mode: str) -> bytes:
    """A transparent picture with a black box in its middle."""
    clear: Any = {"RGBA": (0, 0, 0, 0), "LA": (0, 0)}[mode]
    ink: Any = {"RGBA": (0, 0, 0, 255), "LA": (0, 255)}[mode]
    image = Image.new(mode, (60, 40), clear)
    image.paste(ink, (20, 10, 40, 30))
    return encode(image)


def palette_clear() -> bytes:
    image = Image.new("P", (60, 40), 0)
    image.putpalette([0, 0, 0, 255, 0, 0])
    image.paste(1, (20, 10, 40, 30))
    return encode(image, transparency=0)


def with_exif_turn() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encode(flat(size=(80, 40)), "JPEG", exif=exif.tobytes())


def moving(kind: str, count: int = 3) -> bytes:
    frames = [flat(colour) for colour in (RED, (0, 255, 0), (0, 0, 255))][:count]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:])


def lacking(data: bytes, at: float, count: int) -> bytes:
    start = int(len(data) * at)
    return data[:start] + data[start + count :]


def flipped(data: bytes, at: float = 0.5) -> bytes:
    changed = bytearray(data)
    changed[int(len(data) * at)] ^= 0xFF
    return bytes(changed)


def huge_png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    body = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")


def film(width: int = 64, height: int = 48, frames: int = 8, kind: str = "mp4", codec: str = "mpeg4") -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=4)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(frames):
            pixels = np.full((height, width, 3), 20 + 20 * index, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    return buffer.getvalue()


def turned_film() -> bytes:
    """A film as a telephone writes it: wide frames, and a matrix that stands it upright."""
    data = film(64, 32)
    straight = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)
    at = data.index(straight, data.index(b"tkhd"))
    return data[:at] + turned + data[at + len(turned) :]


def sound_only() -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return buffer.getvalue()


def said(content: Any, role: Any = "user", **more: Any) -> Callable[[Path], Any]:
    return row(problem=[{"role": role, "content": content}], **more)


def zipped(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


THREE = jsonl(SOUND, SOUND, SOUND)
URL = base64.b64encode(encode(flat())).decode()
PNG = encode(flat())
CSV = "problem,answer\nWhat?,1\n{}\nWhat?,1\n"


def csv(middle: str | bytes, **kw: Any) -> Callable[[Path], str]:
    head, tail = CSV.encode().split(b"{}")
    return whole(head + (middle if isinstance(middle, bytes) else middle.encode()) + tail, "train.csv")


def lines_and_files() -> dict[str, Case]:
    sound = json.dumps(SOUND).encode()
    return {
        "byte order mark": Case(whole(b"\xef\xbb\xbf" + THREE), Read(truth="2")),
        "utf-16": Case(whole(THREE.decode().encode("utf-16")), Refused("UTF-8")),
        "latin-1 in one line": Case(line('{"problem": "é", "answer": "1"}'.encode("latin-1")), Named("UTF-8")),
        "windows line ends": Case(whole(THREE.replace(b"\n", b"\r\n")), Read(truth="2")),
        "old mac line ends": Case(whole(b"\r".join([sound] * 3)), Named("JSON", 1, 1)),
        "blank line between": Case(whole(sound + b"\n\n" + sound + b"\n"), Read(truth="2", rows=2)),
        "no last line end": Case(whole(b"\n".join([sound] * 3)), Read(truth="2")),
        "last line cut in half": Case(whole(b"\n".join([sound, sound[:20]])), Named("JSON", 2, 2)),
        "zero bytes in a line": Case(line(b'{"problem": "a\0b", "answer": "1"}'), Named("JSON")),
        "line separator in a text": Case(line('{"problem": "a\u2028b", "answer": "1"}'), Read("a\u2028b", "1")),
        "NaN as truth": Case(line('{"problem": "?", "answer": NaN}'), Named("nan|NaN|not a number")),
        "infinite truth": Case(line('{"problem": "?", "answer": 1e400}'), Named("inf")),
        "integer of 5,000 digits": Case(line(f'{{"problem": "?", "answer": {"9" * 5000}}}'), Named("digits|JSON")),
        "key twice": Case(line('{"problem": "?", "answer": "1", "answer": "2"}'), Named("twice|'answer'")),
        "array as a row": Case(line('["?", "1"]'), Named("JSON|object")),
        "null as a row": Case(line("null"), Named("JSON|object")),
        "nested 50,000 deep": Case(line('{"problem": ' + "[" * 50_000 + "]" * 50_000 + "}"), Named("nested|deep")),
        "half a surrogate pair in a prompt": Case(line(r'{"problem": "a\ud800b", "answer": "1"}'), Named("surrogate")),
        "half a surrogate pair in a truth": Case(line(r'{"problem": "?", "answer": "\udc00"}'), Named("surrogate")),
        "half a surrogate pair in a column": Case(
            line(r'{"problem": "?", "answer": "1", "note": "\ud800"}'), Named("surrogate")
        ),
        "emoji and accents": Case(line('{"problem": "e\u0301 👩‍🚀", "answer": "é"}'), Read("e\u0301 👩‍🚀", "é")),
        "comments in JSON": Case(line('{"problem": "?", "answer": "1"} // no'), Named("JSON")),
        "python literals": Case(line("{'problem': '?', 'answer': None}"), Named("JSON")),
        "trailing comma": Case(line('{"problem": "?", "answer": "1",}'), Named("JSON")),
        "two objects on a line": Case(line(sound + sound), Named("JSON")),
        "a hundred thousand letters": Case(line(json.dumps({"problem": "x" * 100_000, "answer": "1"})), Named("token")),
        "empty file": Case(whole(b""), Refused("no rows|empty")),
        "file of spaces": Case(whole(b" \n \n"), Refused("no rows|empty")),
        "capital ending": Case(whole(THREE, "TRAIN.JSONL"), Read(truth="2")),
        "json array": Case(whole(json.dumps([SOUND] * 3).encode(), "train.json"), Read(truth="2")),
        "json of columns": Case(
            whole(json.dumps({"problem": ["a", "b"], "answer": ["1", "2"]}).encode(), "train.json"), Refused("JSON")
        ),
        "json with rows below a key": Case(
            whole(json.dumps({"data": [SOUND] * 3}).encode(), "train.json"), Refused("data|JSON")
        ),
        "lines in a .json": Case(whole(THREE, "train.json"), Read(truth="2")),
        "an array in a .jsonl": Case(whole(json.dumps([SOUND] * 3, indent=1).encode()), Refused("JSON")),
        "gzip": Case(whole(gzip.compress(THREE), "train.jsonl.gz"), Read(truth="2")),
        "gzip without saying so": Case(whole(gzip.compress(THREE)), Refused("gz|UTF-8")),
        "gzip cut off": Case(whole(gzip.compress(THREE)[:30], "train.jsonl.gz"), Refused("gz|cut|end")),
        "zip": Case(whole(zipped("train.jsonl", THREE), "train.zip"), Refused("zip")),
        "excel": Case(whole(zipped("xl/workbook.xml", b"<x/>"), "train.xlsx"), Refused("xlsx")),
        "pickle": Case(whole(b"\x80\x04]\x94.", "train.pkl"), Refused("pkl")),
        "text file": Case(whole(b"a\nb\n", "train.txt"), Refused("txt")),
        "folder of a file's name": Case(files(("train.jsonl/x.txt", b"")), Refused("no data file")),
        "folder of nothing": Case(files(("empty/.keep", b""), read="empty"), Refused("empty")),
        "folder without its split": Case(files(("test.jsonl", THREE)), Refused("train")),
        "folder with a hidden copy": Case(files(("train.jsonl", THREE), ("._train.jsonl", b"\0\5")), Read(truth="2")),
        "folder with two formats": Case(
            files(("train.jsonl", THREE), ("train.csv", b"problem,answer\n?,1\n")), Refused("several kinds")
        ),
        "name with spaces and signs": Case(whole(THREE, "tr ain é%20#1.jsonl"), Read(truth="2")),
        "name with a line end": Case(whole(THREE, "tr\nain.jsonl"), Read(truth="2")),
        "slice of nothing": Case(files(("train.jsonl", THREE), read="train.jsonl[2:2]"), Refused("holds none")),
        "slice backwards": Case(files(("train.jsonl", THREE), read="train.jsonl[2:1]"), Refused("no rows|empty|slice")),
        "slice past the end": Case(files(("train.jsonl", THREE), read="train.jsonl[1:9]"), Read(truth="2", rows=2)),
        "slice of words": Case(files(("train.jsonl", THREE), read="train.jsonl[a:b]"), Refused("slice|a:b")),
        "no such file": Case(lambda folder: str(folder / "train.jsonl"), Refused("train.jsonl")),
    }


def tables() -> dict[str, Case]:
    return {
        "csv with a header twice": Case(whole(b"problem,answer,answer\na,1,2\n", "train.csv"), Refused("twice|answer")),
        "csv with a line end in a cell": Case(csv('"a\nb",1'), Read("a\nb", "1")),
        "csv with a cell too few": Case(csv("What?"), Named("cell|column|field|empty")),
        "csv with a cell too many": Case(csv("What?,1,2"), Named("cell|column|field")),
        "csv by semicolons": Case(whole(b"problem;answer\na;1\n", "train.csv"), Named("column", 1, 1)),
        "csv with a byte order mark": Case(
            whole(b"\xef\xbb\xbfproblem,answer\na,1\na,1\na,1\n", "train.csv"), Read(truth="1")
        ),
        "csv without a truth": Case(csv("What?,"), Named("empty|answer|blank", taken=True)),
        "csv in latin-1": Case(csv("é,1".encode("latin-1")), Refused("UTF-8")),
        "csv with an open quote": Case(csv('"What?,1'), Refused("quote|csv")),
        "csv with zero bytes": Case(csv(b"a\0b,1"), Read("a\0b")),
        "csv of a header": Case(whole(b"problem,answer\n", "train.csv"), Refused("no rows|empty")),
        "csv with a long cell": Case(csv("x" * 200_000 + ",1"), Named("token")),
        "csv with spaces in its header": Case(
            whole(b"problem, answer\na,1\n", "train.csv"), Named("' answer'|column", 1, 1)
        ),
        "csv with leading zeros": Case(csv("a,007"), Read(truth="007")),
        "csv that says NA": Case(csv("a,NA"), Read(truth="NA")),
        "tsv": Case(whole(b"problem\tanswer\na\t1\n", "train.tsv"), Refused("tsv")),
        "parquet of no rows": Case(
            parquet(schema=pa.schema([("problem", pa.string()), ("answer", pa.string())])), Refused("no rows|empty")
        ),
        "parquet of no bytes": Case(whole(b"", "train.parquet"), Refused("train.parquet")),
        "parquet cut off": Case(whole(b"PAR1" + b"\0" * 50, "train.parquet"), Refused("train.parquet")),
        "parquet of a signature": Case(whole(b"PAR1PAR1", "train.parquet"), Refused("train.parquet")),
        "parquet that is text": Case(whole(THREE, "train.parquet"), Refused("train.parquet")),
        "parquet with a broken page": Case(broken_page, Named("row group")),
        "parquet with a column twice": Case(twice_named, Refused("twice|answer")),
        "parquet with nested pictures": Case(
            parquet(*[{**SOUND, "problem": "<image>?", "images": [{"bytes": PNG, "path": None}]}] * 3),
            Read(pictures=1),
        ),
        "parquet in many row groups": Case(parquet(*[SOUND] * 3, row_group_size=1), Read(truth="2")),
        "parquet in brotli": Case(parquet(*[SOUND] * 3, compression="brotli"), Read(truth="2")),
        "parquet of dictionaries": Case(
            column("answer", ["1", "7", "1"], pa.dictionary(pa.int32(), pa.string())), Read(truth="7")
        ),
        "parquet of large strings": Case(column("problem", ["?", "big", "?"], pa.large_string()), Read("big")),
        "parquet of whole numbers": Case(column("answer", [1, 7, 1], pa.int64()), Read(truth="7")),
        "parquet of floats": Case(column("answer", [1.0, 7.5, 1.0], pa.float64()), Read(truth="7.5")),
        "parquet with NaN": Case(column("answer", [1.0, float("nan"), 1.0], pa.float64()), Named("nan|not a number")),
        "parquet of decimals": Case(
            column("answer", [Decimal("1.50"), Decimal("7.50"), Decimal("1.50")], pa.decimal128(9, 2)),
            Read(truth="7.50"),
        ),
        "parquet of booleans": Case(column("answer", [True, False, True], pa.bool_()), Read(truth="False")),
        "parquet of bytes as truth": Case(column("answer", [b"1", b"7", b"1"], pa.binary()), Read(truth="7")),
        "parquet of bytes that are no text": Case(
            column("answer", [b"1", b"\xff\xfe", b"1"], pa.binary()), Named("UTF-8|bytes")
        ),
        "parquet of bytes as prompt": Case(column("problem", [b"?", b"why", b"?"], pa.binary()), Read("why")),
        "parquet with null as prompt": Case(column("problem", ["?", None, "?"], pa.string()), Named("empty|null")),
        "parquet with dates": Case(
            column("when", [datetime(2026, 1, 1)] * 3, pa.timestamp("ms")),
            Read(metadata={"when": datetime(2026, 1, 1)}),
        ),
        "parquet with a map": Case(
            column("extra", [[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())), Read(truth="1")
        ),
        "parquet of messages": Case(
            parquet(*[{"problem": [{"role": "user", "content": "why"}], "answer": "1"}] * 3), Read("why")
        ),
        "parquet with a list as truth": Case(
            column("answer", [["1"], ["7", "8"], ["1"]], pa.list_(pa.string())), Read(truth='["7", "8"]')
        ),
    }


def prompts_and_truths() -> dict[str, Case]:
    picture = {"images": [PNG]}
    return {
        "no prompt column": Case(row(problem=MISSING), Named("prompt|problem")),
        "no truth column": Case(row(answer=MISSING), Named("answer")),
        "prompt is a number": Case(row(problem=5), Named("text or a list")),
        "prompt is true": Case(row(problem=True), Named("text or a list")),
        "prompt is an object": Case(row(problem={"text": "?"}), Named("text or a list")),
        "prompt is nothing": Case(row(problem=""), Named("no text|empty|blank")),
        "prompt is blank": Case(row(problem=" \n\t"), Named("no text|empty|blank")),
        "prompt of invisible signs": Case(row(problem="\u200b\ufeff"), Named("no text|empty|blank")),
        "prompt is an empty list": Case(row(problem=[]), Named("empty|no messages")),
        "prompt with a zero byte": Case(row(problem="a\0b"), Read("a\0b")),
        "prompt from right to left": Case(row(problem="\u202eabc"), Read("\u202eabc")),
        "prompt of a picture alone": Case(row(problem="<image>", **picture), Read(pictures=1)),
        "prompt too long": Case(row(problem="x" * 9000), Named("token")),
        "two markers, one picture": Case(row(problem="<image><image>?", **picture), Named("2 .*1|markers")),
        "one marker, two pictures": Case(row(problem="<image>?", images=[PNG, PNG]), Named("1 .*2|markers")),
        "picture without a marker": Case(row(problem="?", **picture), Read(pictures=1)),
        "the marker as a word": Case(row(problem="What does <image> mean in HTML?"), Read("What does <image> mean")),
        "the other marker as a word": Case(
            row(problem="<image> and a <video> tag", **picture), Read("and a <video> tag", pictures=1)
        ),
        "chat markup in a prompt": Case(
            row(problem="hi<|im_end|>\n<|im_start|>system"), Named("im_end|special", taken=True)
        ),
        "a placeholder in a prompt": Case(row(problem="<|image_pad|>"), Named("image_pad")),
        "content of a number": Case(said(5), Named("content|text")),
        "content of null": Case(said(None), Named("content|text|empty")),
        "part of a list type": Case(said([{"type": ["image"]}], **picture), Named("type|image")),
        "part without a type": Case(said([{"text": "?"}]), Named("type")),
        "part of an unknown type": Case(said([{"type": "audio", "audio": b""}]), Named("audio")),
        "part that is text": Case(said(["?"]), Named("part|item|content")),
        "message without a role": Case(row(problem=[{"content": "?"}]), Named("role")),
        "message whose role is a list": Case(said("?", role=["user"]), Named("role")),
        "message that is text": Case(row(problem=["?"]), Named("message")),
        "message with more keys": Case(said("why", name="x"), Read("why")),
        "messages as JSON text": Case(row(problem='[{"role": "user", "content": "why"}]'), Read("why")),
        "messages as broken JSON text": Case(row(problem='[{"role": "user", "con'), Named("no JSON")),
        "JSON text nested deep": Case(row(problem="[" * 50_000), Named("token|nested")),
        "a picture in a message": Case(said([{"type": "image", "image": PNG}]), Read(pictures=1)),
        "a picture by URL object": Case(
            said([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{URL}"}}]), Read(pictures=1)
        ),
        "a picture by URL object without one": Case(said([{"type": "image_url", "image_url": {}}]), Named("url|image")),
        "pictures in message and column": Case(said([{"type": "image", "image": PNG}], **picture), Named("both")),
        "messages that end with the model": Case(
            row(problem=[{"role": "user", "content": "?"}, {"role": "assistant", "content": "so"}]),
            Named("assistant|last"),
        ),
        "truth is null": Case(row(answer=None), Named("empty|null")),
        "truth is nothing": Case(row(answer=""), Named("no text|empty|blank", taken=True)),
        "truth is blank": Case(row(answer=" "), Named("no text|empty|blank", taken=True)),
        "truth is zero": Case(row(answer=0), Read(truth="0")),
        "truth is false": Case(row(answer=False), Read(truth="False")),
        "truth is NaN": Case(row(answer=float("nan")), Named("nan|not a number")),
        "truth is the word nan": Case(row(answer="nan"), Read(truth="nan")),
        "truth of bytes": Case(row(answer=b"7"), Read(truth="7")),
        "truth of an empty list": Case(row(answer=[]), Named("empty|no text")),
        "truth of a mapping": Case(row(answer={"a": 1}), Read(truth='{"a": 1}')),
        "truth of many lines": Case(row(answer="a\nb"), Read(truth="a\nb")),
        "truth of a megabyte": Case(row(answer="x" * 10**6), Read(truth="x" * 10**6)),
        "truth of numpy": Case(row(answer=np.int64(7)), Read(truth="7")),
    }


def pictures() -> dict[str, Case]:
    deep = np.full((40, 60), 32768, np.uint16)
    # By the README's rule, JPEGs that lost bytes and still decode are taken: the format has no checksum.
    white = (255, 255, 255)
    return {
        "transparent drawing": Case(shown(drawing("RGBA")), Read(corner=white)),
        "transparent gray drawing": Case(shown(drawing("LA")), Read(corner=white)),
        "transparent palette": Case(shown(palette_clear()), Read(corner=white)),
        "transparent picture in memory": Case(shown(Image.new("RGBA", (60, 40), (0, 0, 0, 0))), Read(corner=white)),
        "16-bit gray": Case(shown(encode(Image.fromarray(deep))), Read(corner=(128, 128, 128))),
        "16-bit gray TIFF": Case(shown(encode(Image.fromarray(deep), "TIFF")), Read(corner=(128, 128, 128))),
        "float TIFF": Case(
            shown(encode(Image.fromarray(np.full((40, 60), 0.5, np.float32)), "TIFF")), Named("float|depth|mode")
        ),
        "32-bit TIFF": Case(
            shown(encode(Image.fromarray(np.full((40, 60), 70_000, np.int32)), "TIFF")), Named("32|depth|mode")
        ),
        "CMYK JPEG": Case(shown(encode(flat((0, 255, 255, 0), "CMYK"), "JPEG")), Read(pictures=1)),
        "one-bit PNG": Case(shown(encode(flat(1, "1"))), Read(corner=white)),
        "turned JPEG": Case(shown(with_exif_turn()), Read(shape="tall")),
        "animated GIF": Case(shown(moving("GIF")), Read(corner=RED)),
        "animated PNG": Case(shown(moving("PNG")), Read(corner=RED)),
        "animated WebP": Case(shown(moving("WEBP")), Read(corner=RED)),
        "TIFF of pages": Case(shown(moving("TIFF")), Read(corner=RED)),
        "JPEG that lost 40 bytes": Case(shown(lacking(noise("JPEG"), 0.5, 40)), Read(pictures=1)),
        "JPEG that lost its last rows": Case(shown(noise("JPEG")[:-200] + b"\xff\xd9"), Read(pictures=1)),
        "PNG with a flipped byte": Case(shown(flipped(noise())), Named("broken|damaged|cannot|decode|PNG")),
        "PNG cut off": Case(shown(noise()[:2000]), Named("truncated|cut")),
        "PNG with something behind": Case(shown(PNG + b"more"), Read(corner=RED)),
        "PNG with a broken colour profile": Case(shown(encode(flat(), icc_profile=b"nonsense")), Read(corner=RED)),
        "web page as a picture": Case(shown(b"<!doctype html><html>404</html>"), Named("cannot be read|no picture")),
        "pointer of git-lfs": Case(
            shown(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"), Named("cannot be read|lfs")
        ),
        "picture of no bytes": Case(shown(b""), Named("0 bytes|empty")),
        "picture of one pixel": Case(shown(encode(flat(size=(1, 1)))), Read(corner=RED)),
        "picture far too wide": Case(shown(encode(flat(size=(900, 3)))), Named("aspect|wide")),
        "picture bomb": Case(shown(huge_png(30_000, 30_000)), Named("limit|bomb|pixels")),
        "BMP": Case(shown(encode(flat(), "BMP")), Read(corner=RED)),
        "WebP without loss": Case(shown(encode(flat(), "WEBP", lossless=True)), Read(corner=RED)),
        "JPEG 2000": Case(shown(encode(flat(), "JPEG2000")), Named("JPEG2000|JPEG 2000|cannot be read")),
        "PDF": Case(shown(b"%PDF-1.4\n1 0 obj\n"), Named("cannot be read")),
        "SVG": Case(shown(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), Named("cannot be read")),
        "gzip of a PNG": Case(shown(gzip.compress(PNG)), Named("cannot be read")),
        "array as a picture": Case(shown(np.zeros((40, 60, 3), np.uint8)), Named("picture|image")),
        "number as a picture": Case(shown(5), Named("picture|image")),
        "null as a picture": Case(shown(None), Named("picture|image")),
        "list in a list": Case(shown([PNG]), Named("picture|image")),
        "one picture, no list": Case(row(problem="<image>?", images=PNG), Read(corner=RED)),
        "mapping of bytes": Case(shown({"bytes": PNG, "path": None}), Read(corner=RED)),
        "mapping of nothing": Case(shown({"bytes": None, "path": None}), Named("picture|image|bytes")),
        "mapping of another key": Case(shown({"data": PNG}), Named("picture|image|bytes")),
        "raw base64": Case(shown(URL * 400), Named("base64")),
        "data URL": Case(shown(f"data:image/png;base64,{URL}"), Read(corner=RED)),
        "data URL with a character set": Case(shown(f"data:image/png;charset=utf-8;base64,{URL}"), Read(corner=RED)),
        "data URL without base64": Case(shown("data:image/png,abc"), Named("base64")),
        "data URL with a broken end": Case(shown("data:image/png;base64,A"), Named("base64")),
        "path of spaces and signs": Case(beside({"a b é%.png": PNG}, "a b é%.png"), Read(corner=RED)),
        "path by file URL": Case(beside({"a b.png": PNG}, "file://{}/a%20b.png"), Read(corner=RED)),
        "path out of the folder": Case(shown("../secret.png"), Named("leads out")),
        "path from another root": Case(shown("/etc/passwd"), Named("leads out")),
        "path of windows": Case(shown("C:\\pictures\\a.png"), Named("no such file")),
        "path with half a surrogate pair": Case(shown("a\ud800.png"), Named("surrogate")),
        "path of 5,000 letters": Case(shown("a" * 5000 + ".png"), Named("too long|no such")),
        "path of nothing": Case(shown(""), Named("empty|picture|path")),
        "file URL of brackets": Case(shown("file://[/x.png"), Named("file://")),
        "URL where none is allowed": Case(shown("https://host/x.png"), Named("allow_urls")),
        "URL of a bucket": Case(shown("s3://bucket/x.png"), Named("s3")),
        "video as a picture": Case(shown(film()), Named("cannot be read|video")),
    }


def videos() -> dict[str, Case]:
    return {
        "film": Case(filmed(film()), Read(videos=1, shape="wide")),
        "film turned by its matrix": Case(filmed(turned_film()), Read(videos=1, shape="tall")),
        "film of odd sizes": Case(filmed(film(62, 46)), Read(videos=1)),
        "film in Matroska": Case(filmed(film(kind="matroska")), Read(videos=1)),
        "film as an animated GIF": Case(filmed(moving("GIF")), Read(videos=1)),
        "film cut off": Case(filmed(film()[:600]), Named("cannot be read|video")),
        "film of noise behind its header": Case(filmed(film()[:200] + b"\xaa" * 3000), Named("cannot be read|video")),
        "film of sound": Case(filmed(sound_only()), Named("video|frames|pictures")),
        "film of no bytes": Case(filmed(b""), Named("0 bytes|empty")),
        "film that is a picture": Case(filmed(PNG), Named("video")),
        "film that is a playlist": Case(filmed(b"#EXTM3U\nfile:///etc/passwd\n"), Named("video")),
        "film that is null": Case(filmed(None), Named("video")),
        "frames": Case(filmed([PNG, PNG]), Read(videos=1)),
        "frames of two sizes": Case(filmed([PNG, noise()]), Named("one size|size")),
        "frames of none": Case(filmed([]), Named("no frames|video")),
        "frames with a broken one": Case(filmed([PNG, b"hello"]), Named("cannot be read")),
        "frames at no rate": Case(filmed({"frames": [PNG, PNG], "fps": 0}), Named("fps")),
        "frames at NaN": Case(filmed({"frames": [PNG, PNG], "fps": float("nan")}), Named("fps")),
        "frames at a word": Case(filmed({"frames": [PNG, PNG], "fps": "fast"}), Named("fps")),
        "frames that are transparent": Case(filmed([drawing("RGBA")] * 2), Read(videos=1)),
        "film missing": Case(filmed("gone.mp4"), Named("no such file")),
    }


CASES: dict[str, Case] = lines_and_files() | tables() | prompts_and_truths() | pictures() | videos()
