"""LMM-R1's message rows from rows with a problem, an answer and perhaps pictures.

    python examples/lmm_r1/make_rows.py hiyouga/geometry3k@train rows/pictures.jsonl

A row becomes `message`, the JSON text of a list of messages, and `answer`, between dollars. Pictures are written into a
folder beside the rows, which name them by their whole paths. The source is a file, a folder, or a name on the hub.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from r1_data import read_rows

SYSTEM = (
    "Solve the problem. Think in <think> </think>, then write the final answer in <answer> </answer>, with nothing "
    "between or around the two. The answer itself stands in \\boxed{}."
)


def picture_path(picture: Any, folder: Path, name: str) -> str:
    """Write a picture's bytes where they are not a file yet; return its whole path."""
    if isinstance(picture, str):
        return str(Path(picture).resolve())
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{name}.png").resolve()
    path.write_bytes(picture["bytes"])
    return str(path)


def make_row(row: dict[str, Any], keys: argparse.Namespace, number: int, folder: Path) -> dict[str, str]:
    """Return the message row of a plain one."""
    pictures = row.get(keys.images) or []
    paths = [picture_path(one, folder, f"{number}_{i}") for i, one in enumerate(pictures)]
    text = row[keys.problem].replace("<image>", "").strip() if paths else row[keys.problem]
    content = [*({"type": "image", "image": path} for path in paths), {"type": "text", "text": text}]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content if paths else text}]
    answer = str(row[keys.answer]).rpartition("####")[2].strip().strip("$")
    return {"message": json.dumps(messages), "answer": f"${answer}$"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", help="what data.train_files may name")
    parser.add_argument("output", type=Path, help="a .jsonl file")
    parser.add_argument("--problem", default="problem")
    parser.add_argument("--answer", default="answer")
    parser.add_argument("--images", default="images")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(arguments.source)
    with arguments.output.open("w", encoding="utf-8") as file:
        for number, (_, row) in enumerate(rows):
            made = make_row(row, arguments, number, arguments.output.with_suffix(""))
            file.write(json.dumps(made, ensure_ascii=False) + "\n")
    print(f"{arguments.output}: {len(rows)} rows")


if __name__ == "__main__":
    main()
