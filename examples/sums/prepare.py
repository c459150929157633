"""Make the rows and the warm-started model of this example, beside this script (or in `--output`).

    python examples/sums/prepare.py

A row asks for the sum, difference or product of two numbers of two digits. A warm start teaches how turns look. A third
of its lessons has no tool and answers with a random number, a third has the tool and does the same, and a third calls
the tool and answers with its result. The program of a call has the two numbers of the question, and in half of these
lessons a random operator. So it is left to GRPO to find out that calling is worth it, and to write the right operator.
The first lessons all call, with the right operator: a model with random weights has to learn first how to copy.
"""

import argparse
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from warm_start import Lesson, build_text_model, warm_start  # noqa: E402

OPERATORS = {"plus": "+", "minus": "-", "times": "*"}
TOOLS = ({"type": "function", "function": {"name": "python"}},)
CORPUS = (*OPERATORS, "user assistant system tool", '"name": "python", "arguments": {"code": "', r"\boxed{")
ROWS = {"train": 2000, "val": 200}
STEPS, LESSONS = 600, 24  # of the warm start, and lessons in each
CALLS_FIRST = 350  # steps whose lessons all call
SEED = 5


def draw_question(rng: random.Random) -> tuple[int, str, int]:
    return rng.randint(10, 99), rng.choice([*OPERATORS]), rng.randint(10, 99)


def compute(first: int, operator: str, second: int) -> int:
    return {"+": first + second, "-": first - second, "*": first * second}[operator]


def write_rows(path: Path, rng: random.Random, number: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for _ in range(number):
            first, word, second = draw_question(rng)
            row = {
                "problem": f"{first} {word} {second}",
                "answer": str(compute(first, OPERATORS[word], second)),
            }
            file.write(json.dumps(row) + "\n")


def draw_lesson(rng: random.Random, number: int, *, sure: bool = False) -> Lesson:
    """Draw a conversation: without the tool, with it but without a call, or with a call.

    sure: the program has the right operator.
    """
    first, word, second = draw_question(rng)
    question = {"role": "user", "content": f"{first} {word} {second}"}
    operator = OPERATORS[word] if sure or rng.random() < 0.5 else rng.choice([*OPERATORS.values()])
    if number % 3 < 2:
        guess = compute(rng.randint(10, 99), operator, rng.randint(10, 99))
        answer = {"role": "assistant", "content": f"\\boxed{{{guess}}}"}
        return Lesson([question, answer], tools=TOOLS if number % 3 else ())
    function = {"name": "python", "arguments": {"code": f"{first} {operator} {second}"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    result = compute(first, operator, second)
    answer = {"role": "assistant", "content": f"\\boxed{{{result}}}"}
    return Lesson([question, call, {"role": "tool", "content": f"{result}\n"}, answer], tools=TOOLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE, help="folder for the rows and the model")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    for name, number in ROWS.items():
        write_rows(arguments.output / f"{name}.jsonl", rng, number)
    model, tokenizer = build_text_model(CORPUS, SEED)

    def draw_lessons(rng: random.Random, step: int) -> list[Lesson]:
        first = step <= CALLS_FIRST
        return [draw_lesson(rng, 2 if first else number, sure=first) for number in range(LESSONS)]

    warm_start(model, tokenizer, draw_lessons, steps=STEPS, seed=SEED, learning_rate=3e-3)
    model.save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")


if __name__ == "__main__":
    main()
