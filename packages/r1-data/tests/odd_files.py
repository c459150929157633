"""Odd and broken files of rows: lines, csv, folders, archives, parquet."""

import gzip
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from odd_cases import SOUND, Case, Named, Read, Refused, whole
from odd_media import PNG


def line(text: str | bytes) -> Callable[[Path], str]:
    """A JSON line of this text, between two sound ones."""
    raw = text if isinstance(text, bytes) else text.encode()
    sound = json.dumps(SOUND).encode()
    return whole(b"\n".join([sound, raw, sound]) + b"\n")


def jsonl(*rows: Mapping[str, Any]) -> bytes:
    return "".join(json.dumps(one) + "\n" for one in rows).encode()


THREE = jsonl(SOUND, SOUND, SOUND)
CSV = "problem,answer\nWhat?,1\n{}\nWhat?,1\n"


def csv(middle: str | bytes, **kw: Any) -> Callable[[Path], str]:
    head, tail = CSV.encode().split(b"{}")
    return whole(head + (middle if isinstance(middle, bytes) else middle.encode()) + tail, "train.csv")


def zipped(name: str, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(name, data)
    return buffer.getvalue()


def zstd(data: bytes) -> bytes:
    packed: bytes = pa.compress(data, codec="zstd", asbytes=True)
    return packed


def files(*named: tuple[str, bytes], read: str = "") -> Callable[[Path], str]:
    """Several files in a folder, of which the folder, or one, is read."""

    def make(folder: Path) -> str:
        for name, data in named:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return f"{folder}/{read}" if read else str(folder)

    return make


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
        "zstd": Case(whole(zstd(THREE), "train.jsonl.zst"), Read(truth="2")),
        "zstd of csv": Case(whole(zstd(b"problem,answer\n" + b"a,1\n" * 3), "train.csv.zst"), Read(truth="1")),
        "zstd without saying so": Case(whole(zstd(THREE)), Refused("zst|UTF-8")),
        "zstd cut off": Case(whole(zstd(THREE)[:30], "train.jsonl.zst"), Refused("zst|cut|end")),
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
