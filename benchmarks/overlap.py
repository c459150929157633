"""Find planted copies and paraphrases of GSM8K's test questions, and time it.

uv run python benchmarks/overlap.py TRAIN.jsonl TEST.jsonl
"""

import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "packages/r1-data/tests"))
import paraphrases

from r1_data.overlap import Fingerprint, Overlap, find_overlaps
from r1_data.overlap.fingerprints import Content
from r1_data.overlap.shares import print_text


def read(path: str) -> list[str]:
    return [json.loads(line)["question"] for line in Path(path).read_text("utf-8").splitlines()]


def prints(texts: Iterable[str]) -> list[Fingerprint]:
    return [Fingerprint(0, number, str(number), Content(print_text(text))) for number, text in enumerate(texts)]


def find(training: list[str], held_out: list[str]) -> list[Overlap]:
    return find_overlaps(prints(training), prints(held_out), index_training=len(training) < len(held_out))


def main() -> None:
    training, test = read(sys.argv[1]), read(sys.argv[2])
    for change in [change for several in paraphrases.FOUND.values() for change in several]:
        rng = random.Random(1)
        planted = [change(text, rng) for text in test]
        changed = sum(one != text for one, text in zip(planted, test, strict=True))
        found = sum(one.training.index == one.held_out.index for one in find(planted, test))
        print(f"{change.__name__}: {found} of {len(test)} found, of which {changed} changed")
    begin = time.process_time()
    found = len(find(training, test))
    spent = time.process_time() - begin
    print(f"training rows as they are: {found} of {len(test)} found, {spent:.1f} s of one core")


if __name__ == "__main__":
    main()
