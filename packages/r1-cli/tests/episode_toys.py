"""Environments of the tests of episodes. They answer the words of a policy that was never taught to call anything."""

import io
import os
import time

from PIL import Image

from r1_rewards.environments import Observation


def png(colour: tuple[int, int, int]) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (56, 56), colour).save(content, "PNG")
    return content.getvalue()


class Album:
    """Answers two turns, the second with a picture, each after `seconds`; the third ends the episode."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def reset(self, row: dict[str, object]) -> None:
        self.turns, self.answer = 0, row["answer"]

    def step(self, text: str) -> object:
        self.turns += 1
        time.sleep(self.seconds * len(text) % 0.05)
        if self.turns == 1:
            return "<|im_end|> is no control token here."
        if self.turns == 2:
            return [
                {"type": "text", "text": "Look:"},
                {"type": "image", "image": Image.new("RGB", (56, 84), (9, 99, 9))},
            ]
        return None


class Judge(Album):
    """Judges its episodes itself: the number of turns, times ten for the right answer `3`."""

    def score(self) -> float:
        return self.turns * (10.0 if self.answer == "3" else 1.0)


class Mortal(Judge):
    """Dies in the second turn of every row that asks for it."""

    def step(self, text: str) -> object:
        if self.turns == 1 and self.answer == "die":
            os._exit(3)
        return super().step(text)


class Failing(Judge):
    """Raises in `reset` or `score` of the rows that ask for it."""

    def reset(self, row: dict[str, object]) -> None:
        super().reset(row)
        if self.answer == "reset":
            raise RuntimeError("no reset")

    def score(self) -> float:
        if self.answer == "score":
            raise RuntimeError("no score")
        return super().score()


class Paying(Album):
    """Gives 0.5 for the first turn and 0.25 for the last."""

    def step(self, text: str) -> object:
        content = super().step(text)
        rewards = {1: 0.5, 3: 0.25}
        return Observation(content, reward=rewards.get(self.turns, 0.0), done=content is None, state=f"s{self.turns}")


class Telling(Album):
    """Adds to the prompt: the same text in every episode, or a picture and a text of its own; or too much."""

    def __init__(self, what: str = "same", seconds: float = 0.0) -> None:
        super().__init__()
        self.what, self.wait = what, seconds

    def reset(self, row: dict[str, object]) -> object:
        super().reset(row)
        time.sleep(self.wait * (os.getpid() % 7))
        if self.what == "same":
            return f" Hint: {row['answer']}.<|im_end|>"
        if self.what == "own":
            number = os.getpid() % 200
            return [
                {"type": "text", "text": f"{number}:"},
                {"type": "image", "image": Image.new("RGB", (84, 56), (number, 9, 9))},
            ]
        return "long " * 500 if row["answer"] == "3" else None


class Showing(Album):
    """Answers the first turn with a picture, and the second with a text."""

    def step(self, text: str) -> object:
        self.turns += 1
        answers = {1: Image.new("RGB", (56, 84), (9, 99, 9)), 2: "So?"}
        return answers.get(self.turns)
