"""`r1 init`: a configuration, a reward, a format prompt and three rows of a task that are the user's to change."""

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

CONFIG, REWARD, FORMAT, ROWS, PICTURES = "config.yaml", "reward.py", "format_prompt.jinja", "rows.jsonl", "pictures"
NAME = re.compile(r"[\w .~/-]*\w")  # of a folder: what neither YAML nor names of data sets and rewards read otherwise
LORA_RATE, FULL_RATE = "1.0e-5", "1.0e-6"

CONFIG_TEXT = """\
# Made by r1 init. Every other key keeps its default; `r1 train {folder}/config.yaml --dry-run --full` shows all.
data:
  train_files: {folder}/rows.jsonl    # put your rows in place of the three: hundreds at least
  val_files: null                     # set it to rows that are not trained on: they show what is learned
  prompt_key: question
  answer_key: answer
{pictures}  format_prompt: {folder}/format_prompt.jinja
  max_prompt_length: 1024             # tokens
  max_response_length: 512
  rollout_batch_size: 3               # prompts a step: 64 or more, once you have the rows
algorithm: {{adv_estimator: grpo, disable_kl: true}}
worker:
  actor:
    global_batch_size: 3              # prompts an optimizer step; raise it with rollout_batch_size
    model: {{model_path: {model}{lora}}}
    optim: {{lr: {rate}}}
  rollout: {{n: 8, tensor_parallel_size: 1}}
  reward: {{reward_function: "{folder}/reward.py:compute_score"}}
trainer:
  project_name: tasks
  experiment_name: {name}
  logger: [console, file]
  n_gpus_per_node: 1
"""
REWARD_TEXT = '''\
"""What an answer is worth. The model learns what this pays, and nothing else: `r1 reward test` tries it."""

import {imports}

MARK = "Answer:"  # format_prompt.jinja asks for it


def compute_score(reward_inputs):
    """Return a score for each answer: 0.9 for what is right in it, and 0.1 for the form."""
    scores = []
    for one in reward_inputs:
        _, mark, answer = one["response"].rpartition(MARK)
        right = grade(answer, one["ground_truth"]) if mark else 0.0
        overall = 0.9 * right + 0.1 * bool(mark)
        scores.append({{"overall": overall, "accuracy": float(right == 1.0), "format": float(bool(mark))}})
    return scores


def grade(answer, ground_truth):
    {grade}
'''
NUMBER = '''"""Return 1.0 if the first number behind the mark is the right one."""
    number = re.search(r"-?\\d+(?:\\.\\d+)?", answer.replace(",", ""))
    return float(number is not None and math.isclose(float(number[0]), float(ground_truth.replace(",", ""))))'''
CHOICE = '''"""Return 1.0 if the first letter behind the mark is the right one, as in `B`, `(b)` or `B. Paris`."""
    letter = re.match(r"[\\s(*]*([A-Za-z])\\b", answer)
    return float(letter is not None and letter[1].upper() == ground_truth.strip().upper())'''
TEXT = '''"""Return 1.0 if the text behind the mark is the right one, but for case, spaces and quotes."""
    first, second = (re.sub(r"\\W+", " ", text).strip().casefold() for text in (answer, ground_truth))
    return float(first == second)'''
FIELDS = '''"""Return the share of the fields that are right in the JSON object behind the mark."""
    try:
        found, expected = json.loads(answer), json.loads(ground_truth)
    except (ValueError, RecursionError):
        return 0.0
    right = [isinstance(found, dict) and found.get(name) == value for name, value in expected.items()]
    return sum(right) / len(right)'''


@dataclass(frozen=True, slots=True)
class NewTask:
    """A kind of task: its three rows, and how their answers are graded."""

    title: str
    imports: str  # of its reward
    grade: str  # the body of the reward's `grade`
    asked: str  # what the format prompt wants behind the mark
    rows: Sequence[tuple[str, str]]  # question and answer
    pictures: Sequence[tuple[str, str]] = ()  # shape and colour of the picture of each row

    @property
    def model(self) -> str:
        return "Qwen/Qwen2.5-VL-3B-Instruct" if self.pictures else "Qwen/Qwen2.5-0.5B-Instruct"


TASKS = {
    "number": NewTask(
        "a number, such as the result of a problem",
        "math\nimport re",
        NUMBER,
        "the number",
        (
            ("A pen costs 3 dollars. What do 12 pens cost?", "36"),
            ("What is 7 * 8 - 6?", "50"),
            ("How many minutes are 2.5 hours?", "150"),
        ),
    ),
    "choice": NewTask(
        "a letter: one of several choices",
        "re",
        CHOICE,
        "the letter of the right choice",
        (
            ("Which is a prime number?\nA. 21\nB. 23\nC. 27", "B"),
            ("Which planet is nearest to the sun?\nA. Mercury\nB. Venus\nC. Mars", "A"),
            ("What boils at 100 degrees Celsius?\nA. iron\nB. oxygen\nC. water", "C"),
        ),
    ),
    "text": NewTask(
        "a word or a short text",
        "re",
        TEXT,
        "a word or a name",
        (
            ("What is the capital of France?", "Paris"),
            ("What is the opposite of hot?", "cold"),
            ("Which animal says meow?", "cat"),
        ),
    ),
    "json": NewTask(
        "a JSON object: fields of a text",
        "json",
        FIELDS,
        'a JSON object with the fields "name" and "year"',
        (
            ("Ada Lovelace was born in 1815.", '{"name": "Ada Lovelace", "year": 1815}'),
            ("In 1912, Alan Turing was born.", '{"name": "Alan Turing", "year": 1912}'),
            ("The year 1906 saw the birth of Grace Hopper.", '{"name": "Grace Hopper", "year": 1906}'),
        ),
    ),
    "picture": NewTask(
        "a word or a short text about a picture",
        "re",
        TEXT,
        "a word",
        (
            ("<image>Which colour is the circle?", "red"),
            ("<image>Which shape is this?", "square"),
            ("<image>Which colour is the square?", "green"),
        ),
        (("ellipse", "red"), ("rectangle", "blue"), ("rectangle", "green")),
    ),
}


def task_files(folder: Path, kind: str, model: str, *, lora: bool) -> dict[Path, bytes]:
    """Return the files of a new task by their paths. Raises ValueError if the folder's name cannot be used."""
    if not NAME.fullmatch(str(folder)):
        raise ValueError(f"{folder}: name a folder with letters, digits, spaces, and . _ - ~ / only")
    task, home = TASKS[kind], folder.as_posix()
    config = CONFIG_TEXT.format(
        folder=home,
        name=_scalar(folder.absolute().name),
        model=_scalar(model),
        lora=", lora: {rank: 16}" if lora else "",
        rate=LORA_RATE if lora else FULL_RATE,
        pictures=f"  image_dir: {home}\n" if task.pictures else "",
    )
    texts = {
        CONFIG: config,
        REWARD: REWARD_TEXT.format(imports=task.imports, grade=task.grade),
        FORMAT: f"{{{{ content }}}}\n\nThink first. Then end with a line `Answer:`, followed by {task.asked}.\n",
        ROWS: "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in _rows(task)),
    }
    drawn = {f"{PICTURES}/{number}.png": _draw(*one) for number, one in enumerate(task.pictures, start=1)}
    return {folder / name: content for name, content in {**_encoded(texts), **drawn}.items()}


def _rows(task: NewTask) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [{"question": question, "answer": answer} for question, answer in task.rows]
    return [{**row, "images": [f"{PICTURES}/{n}.png"]} if task.pictures else row for n, row in enumerate(rows, 1)]


def _encoded(texts: dict[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in texts.items()}


def _scalar(value: str) -> str:
    """Return a text as YAML in a flow mapping."""
    return yaml.safe_dump([value], default_flow_style=True, width=10**9).strip().removeprefix("[").removesuffix("]")


def _draw(shape: str, colour: str) -> bytes:
    from PIL import Image, ImageDraw

    picture, content = Image.new("RGB", (112, 112), "white"), io.BytesIO()
    draw = ImageDraw.Draw(picture)
    (draw.ellipse if shape == "ellipse" else draw.rectangle)((28, 28, 84, 84), fill=colour)
    picture.save(content, "PNG")
    return content.getvalue()
