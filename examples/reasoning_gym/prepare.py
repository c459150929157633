"""Make the warm-started model of this example, beside this script (or in `--output`). Needs reasoning-gym.

    python examples/reasoning_gym/prepare.py

The lessons are rows of the tasks with a seed of their own. Half of them have the right answer, the others that of
another row of the task, so that the model knows the form of an answer and some of the task, and guesses.
"""

import argparse
import random
import sys
from collections import Counter
from pathlib import Path

from r1_data.sources import read_rows

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from warm_start import Lesson, build_text_model, warm_start  # noqa: E402

TASKS = (
    "gcd:max_value=20",
    "lcm:max_value=9",
    "leg_counting:min_animals=1:max_animals=1:min_instances=1:max_instances=3",
    "coin_flip:min_trials=1:max_trials=3",
    "simple_equations:min_terms=2:max_terms=2:min_value=1:max_value=4",
)
ROWS = 2000  # of a task
RIGHT = 0.5  # share of lessons with the right answer
STEPS, LESSONS = 900, 24  # of the warm start, and lessons in each
COMMON = 0.2  # share of a task's rows that have a word: such words become tokens, others are spelled
SEED = 5


def read_task(task: str) -> list[tuple[str, str]]:
    """Return questions with their answers."""
    rows = read_rows(f"reasoning_gym:{task}:size={ROWS}:seed={SEED}")
    return [(str(row["question"]), str(row["answer"])) for _, row in rows]


def list_words(rows: list[tuple[str, str]]) -> list[str]:
    counts = Counter(word for question, _ in rows for word in set(question.split()))
    return [word for word, count in counts.items() if count >= COMMON * len(rows) and word.isalpha()]


def draw_lesson(rng: random.Random, rows: list[tuple[str, str]]) -> Lesson:
    question, answer = rng.choice(rows)
    if rng.random() >= RIGHT:
        answer = rng.choice(rows)[1]
    return Lesson([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "model", help="folder for the model")
    parser.add_argument("--tasks", nargs="+", default=TASKS, help="tasks with their arguments")
    arguments = parser.parse_args()
    tasks = [read_task(task) for task in arguments.tasks]
    corpus = [" ".join(["user assistant", *(word for rows in tasks for word in list_words(rows))])]
    model, tokenizer = build_text_model(corpus, SEED)

    def draw_lessons(rng: random.Random, step: int) -> list[Lesson]:
        return [draw_lesson(rng, tasks[number % len(tasks)]) for number in range(LESSONS)]

    warm_start(model, tokenizer, draw_lessons, steps=STEPS, seed=SEED, learning_rate=3e-3)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)


if __name__ == "__main__":
    main()
