"""What worker processes are made to hold in the tests; a module of its own, because they have to import it."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

from r1_data.conversations.check import ConversationInspector, ExaminedConversation
from r1_data.render import Renderer
from r1_data.types import Conversation, Example, MediaError

MEGABYTE = 2**20


class Target:
    """What a worker can be made to do. It crashes, hangs or swells where an example says so."""

    def add(self, a: int, b: int) -> int:
        return a + b

    def refuse(self) -> None:
        raise MediaError("t:1: no such picture")

    def tensor(self) -> torch.Tensor:
        return torch.arange(24).view(2, 3, 4).permute(2, 0, 1)

    def arrays(self) -> tuple[torch.Tensor, torch.Tensor, str]:
        return torch.arange(10**6).view(1000, 1000), torch.zeros(0, 3), "done"

    def act(self, text: str) -> None:
        if "crash" in text:
            os._exit(7)
        if "hang" in text:
            time.sleep(600)
        if "stall" in text:
            os.write = _write_half
        if "slain" in text:
            os.kill(os.getpid(), signal.SIGKILL)
        if "unlucky" in text and not (mark := Path(text.split()[1])).exists():
            mark.touch()
            if "255" in text:
                os._exit(255)
            os.kill(os.getpid(), signal.SIGTERM if "SIGTERM" in text else signal.SIGKILL)
        if "terminated" in text and not (mark := Path(text.split()[1])).exists():
            mark.with_suffix(".part").write_text(str(os.getpid()))
            mark.with_suffix(".part").rename(mark)
            signal.pause()
        if "swell" in text:
            bytearray(600 * MEGABYTE)

    def measure(self, examples: list[Example], *limit: int | None) -> list[int]:
        for example in examples:
            self.act(str(example.messages))
        return [len(str(example.messages)) for example in examples]


def _write_half(descriptor: int, part: memoryview, write=os.write) -> int:
    """What a worker's `os.write` becomes that stalls while it sends."""
    write(descriptor, part[: part.nbytes // 2])
    time.sleep(600)
    return 0


class Frail(Renderer):
    """A renderer with a decoder that some rows break."""

    def measure(self, examples, *limit):
        Target().measure(examples)
        return super().measure(examples, *limit)


class CrashingConversations(ConversationInspector):
    """Its worker dies with a conversation that says so."""

    def inspect(self, conversations: Sequence[Conversation]) -> list[ExaminedConversation]:
        Target().act(str([one.messages for one in conversations]))
        return super().inspect(conversations)


class Stub:
    """In the place of a renderer: no row takes it any time, unless the row says that it shall break."""

    tokenizer = SimpleNamespace(all_special_tokens=[], added_tokens_decoder={})

    def measure(self, examples: list[Example], *limit: int | None) -> list[int]:
        return [10] * len(examples)

    def load(self, example: Example) -> None:
        Target().act(str(example.messages))
