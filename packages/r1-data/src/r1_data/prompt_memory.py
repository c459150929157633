"""The prompts that a run holds in memory: those used last and those made ahead, bounded over all its data sets."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

from r1_data.ahead import Ahead, Job
from r1_data.types import Prompt


class PromptMemory:
    """Renderings by (data set, row). Data sets that share one share its bound, however many they are."""

    def __init__(self, max_bytes: int = 256 * 2**20) -> None:
        """`max_bytes`: for renderings kept, and as much again for those made ahead."""
        self.bytes = 0  # of renderings kept
        self._max_bytes = max_bytes
        self._prompts: OrderedDict[Any, Prompt] = OrderedDict()
        self._ahead = Ahead(max_bytes)

    def plan(self, jobs: Iterable[Job]) -> None:
        """Render these next, in this order; a plan made before, for whichever data set, is forgotten."""
        self._ahead.plan(job for job in jobs if job.key not in self._prompts)

    def get(self, key: Any, start: "Callable[[], Future[Prompt]]") -> Prompt:
        """The prompt kept, made ahead, or made now. Raises what its rendering raised."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._prompts.move_to_end(key)
            return prompt
        prompt = self._ahead.take(key, start).result()
        self._prompts[key] = prompt
        self.bytes += _size(prompt)
        while self.bytes > self._max_bytes and self._prompts:
            self.bytes -= _size(self._prompts.popitem(last=False)[1])
        return prompt


def _size(prompt: Prompt) -> int:
    """About how many bytes a prompt holds: its tensors, its pictures' pixels (RGB), its tokens."""
    tensors = sum(tensor.nbytes for tensor in (prompt.position_ids, *prompt.videos, *prompt.model_inputs.values()))
    pixels = sum(3 * image.width * image.height for image in prompt.images)
    return tensors + pixels + 16 * len(prompt.token_ids) + len(prompt.text)
