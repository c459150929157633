"""Runs of episodes: an environment that shows one more picture, an agent, and the settings of both."""

from pathlib import Path

ENVIRONMENT = '''
import os
import time
from pathlib import Path

from PIL import Image


class Album:
    """Shows one more picture, and judges by the parity of the words that it heard. Notes its calls in a file."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def reset(self, row):
        self.heard = ""

    def step(self, text):
        with Path(__file__).with_suffix(".calls").open("a") as calls:
            calls.write(".")
        time.sleep(self.seconds)
        first, self.heard = not self.heard, self.heard + text
        picture = Image.new("RGB", (56, 56), (9, 99, len(text)))
        return [{"type": "image", "image": picture}, {"type": "text", "text": "Again?"}] if first else None

    def score(self):
        return float(sum(map(ord, self.heard)) % 2)


class Dice(Album):
    """Shows what no call shows again."""

    def step(self, text):
        return super().step(text) and f"Again? {os.urandom(2).hex()}"
'''

# Two turns of a conversation, and one of another.
AGENT = """
import json, os, urllib.request

row = json.loads(os.environ["R1_ROW"])
messages, total = row["messages"], 0


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": "policy", "messages": messages}).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    with urllib.request.urlopen(request) as response:
        return json.loads(response.read())["choices"][0]["message"]


for question in ("Again?", "Sure?"):
    said = ask(messages)
    total += sum(map(ord, said["content"]))
    messages += [said, {"role": "user", "content": question}]
ask([{"role": "system", "content": "Judge."}, {"role": "user", "content": "Good?"}])
reward = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/reward",
    json.dumps({"reward": total % 2}).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
urllib.request.urlopen(reward).close()
"""


def write_environment(folder: Path) -> Path:
    (path := folder / "album.py").write_text(ENVIRONMENT)
    return path


def calls_of(environment: Path) -> int:
    """How often an environment has been called."""
    noted = environment.with_suffix(".calls")
    return noted.stat().st_size if noted.exists() else 0


def episodes(environment: Path, name: str = "Album", **own: object) -> list[str]:
    """Return the settings of episodes in rounds, with dynamic sampling. `own` are of `multi_turn`."""
    settings = {"enable": "true", "environment": f"{environment}:{name}", "scheduling": "rounds", "max_turn_tokens": 8}
    return [
        *(f"worker.rollout.multi_turn.{key}={value}" for key, value in (settings | own).items()),
        "data.max_response_length=60", "algorithm.online_filtering=true", "algorithm.filter_key=overall",
        "trainer.max_try_make_batch=-1",
    ]  # fmt: skip


def agents(agent: str) -> list[str]:
    """Return the settings of a run of an agent, with dynamic sampling."""
    key = "worker.rollout.multi_turn"
    own = [f"{key}.enable=true", f"{key}.agent={agent}", f"{key}.num_workers=2", f"{key}.max_concurrent=7"]
    limits = [f"{key}.max_turn_tokens=8", "data.max_response_length=60"]
    filtering = ["algorithm.online_filtering=true", "algorithm.filter_key=overall", "trainer.max_try_make_batch=-1"]
    return [*own, *limits, *filtering]
