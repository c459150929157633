"""`r1 data check` of many text rows, beside a filter by length of `datasets` with the same tokenizer.

uv run python benchmarks/check.py [--rows 1000000] [--kind jsonl] [--reward math] [--peer 20000] [--workers 2]

Rows are questions of grade-school length, each different, answers whole numbers, one in ten their first. The check is
the whole command in processes of its own: rows are read, examined, measured and compared with one another, answers are
tried on the reward, a page is written; nothing is known of any row beforehand. The peer is what EasyR1 does with the
same file: `datasets` filters it by the length of the prompt, chat template and tokenizer applied row by row. It counts
tokens and finds nothing else; it is measured on `--peer` rows in one process, and several take no less together.

Where other work runs beside it, compare processor time. Linux. The last line is one JSON object.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "examples/gsm8k/sample.jsonl"
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""
LIMIT = 1024  # tokens


class Used(NamedTuple):
    """What a command and all that it started took."""

    wall: float  # seconds
    processor: float  # seconds
    memory: int  # bytes, the most that all processes together held at a time; shared pages count once


def write_rows(path: Path, count: int) -> None:
    """Questions whose sentences come from all of the sample, with numbers of their own."""
    draw = random.Random(0)
    questions = [json.loads(line)["question"] for line in SAMPLE.read_text("utf-8").splitlines()]
    sentences = [sentence for question in questions for sentence in question.split(". ")]
    rows = (
        {"problem": f"{'. '.join(draw.choices(sentences, k=4))} ({index})", "answer": str(index // 10)}
        for index in range(count)
    )
    if path.suffix == ".jsonl":
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        return
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def write_model(folder: Path) -> None:
    """A tokenizer of byte pairs, as Qwen's, learned from this repository's pages, and a configuration beside it."""
    bpe = ByteLevelBPETokenizer()
    pages = [str(SAMPLE), *map(str, ROOT.glob("**/*.md"))]
    bpe.train(pages, vocab_size=16_000, special_tokens=[PAD, START, END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token=END, pad_token=PAD)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(folder)


def measure(command: list[str]) -> tuple[Used, str]:
    """Run a command and watch all processes of its session."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    used: dict[int, float] = {}
    most = 0

    def watch() -> None:
        nonlocal most
        while process.poll() is None:
            held = 0
            for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                    if int(fields[3]) != process.pid:
                        continue
                    used[pid] = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
                    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                    held += sum(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
                except OSError:
                    continue
            most = max(most, held)
            time.sleep(0.25)

    watching = threading.Thread(target=watch)
    watching.start()
    output = process.communicate()[0]
    wall = time.perf_counter() - start
    watching.join()
    return Used(wall, sum(used.values()), most), output


def check(rows: Path, model: Path, folder: Path, reward: str, workers: int) -> Used:
    """The whole command, with nothing known of any row."""
    settings = [
        f"data.train_files={rows}",
        f"data.cache_dir={folder}/cache",
        f"data.max_prompt_length={LIMIT}",
        f"data.filter_overlong_prompts_workers={max(2, workers)}",
        f"worker.actor.model.model_path={model}",
        f"worker.reward.num_cpus={workers}",
    ]
    settings += [f"worker.reward.reward_function={reward}"] if reward else []
    command = [sys.executable, "-m", "r1_cli.main", "data", "check", *settings, "--html", f"{folder}/page.html"]
    used, output = measure(command)
    assert (folder / "page.html").exists(), output
    return used


def run_peer(rows: Path, model: Path, count: int) -> float:
    """Seconds of a processor for `count` rows."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as it is once `datasets` has forked
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(model)
    kind = {".jsonl": "json", ".parquet": "parquet"}[rows.suffix]

    def fits(row: dict[str, Any]) -> bool:
        messages = [{"role": "user", "content": row["problem"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return len(tokenizer.encode(text, add_special_tokens=False)) <= LIMIT

    with tempfile.TemporaryDirectory() as cache:
        data = datasets.load_dataset(kind, data_files=str(rows), split="train", cache_dir=cache).select(range(count))
        begin = time.process_time()
        assert len(data.filter(fits)) == count
        return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--kind", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--reward", default="math", help="that the answers are tried on; '': none")
    parser.add_argument("--peer", type=int, default=20_000, help="rows on which the peer is measured; 0: not at all")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, model = folder / f"rows.{options.kind}", folder / "model"
        write_rows(rows, options.rows)
        write_model(model)
        used = check(rows, model, folder, options.reward, options.workers)
        print(f"{options.rows:,} rows: {used.wall:.1f} s, {used.processor:.1f} s of processors, {used.memory:,} bytes")
        result = {
            "rows": options.rows,
            "kind": options.kind,
            "reward": options.reward,
            "seconds": round(used.wall, 1),
            "processor_microseconds_a_row": round(1e6 * used.processor / options.rows),
            "memory_gb": round(used.memory / 1e9, 2),
        }
        if options.peer:
            count = min(options.peer, options.rows)
            each = run_peer(rows, model, count) / count
            print(f"`datasets` filters by length in {1e6 * each:.0f} microseconds a row of one processor")
            result["peer_microseconds_a_row"] = round(1e6 * each)
            result["ratio"] = round(each * options.rows / used.processor, 2)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
