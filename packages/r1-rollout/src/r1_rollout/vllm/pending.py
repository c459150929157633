"""The unfinished requests of a call to vLLM in this process: one for each sample, collected into groups."""

from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from r1_rollout.session import Finished, SampleKey
from r1_rollout.types import Completion, PromptLike, SamplingParams

if TYPE_CHECKING:
    from vllm import SamplingParams as Settings

    Add: TypeAlias = Callable[[PromptLike, dict[str, Settings]], None]
    Advance: TypeAlias = Callable[[dict[str, PromptLike]], list[tuple[str, Completion, int]]]


@dataclass(slots=True)
class _Group:
    prompt: PromptLike
    names: list[str]  # of its samples' requests
    split: bool  # its samples are returned one by one
    completions: dict[str, Completion] = field(default_factory=dict)


class PendingRequests:
    def __init__(
        self,
        add: "Add",
        advance: "Advance",
        abort: Callable[[Collection[str]], None],
        end_token_ids: frozenset[int],
    ) -> None:
        """Take vLLM's calls.

        Args:
            add: begins requests for one prompt, by their names.
            advance: runs a step; given the prompt of each unfinished request, it returns those that have finished,
                and how many tokens of each prompt were computed.
            abort: drops requests by their names.
        """
        self._add, self._advance, self._abort, self._ends = add, advance, abort, end_token_ids
        self._groups: dict[Hashable, _Group] = {}
        self._owners: dict[str, Hashable] = {}  # of unfinished requests
        self._begun = 0  # groups
        self.prefilled = 0  # tokens of finished requests' prompts that no cache had

    @property
    def pending(self) -> bool:
        return bool(self._groups)

    def submit(self, key: Hashable, prompt: PromptLike, params: SamplingParams, *, split: bool = False) -> None:
        from r1_rollout.vllm.requests import sample_settings

        self._begun += 1
        requests = {
            f"{self._begun}.{sample}": sample_settings(params, self._ends, prompt.id, sample)
            for sample in range(params.n)
        }
        self._groups[key] = _Group(prompt, list(requests), split)
        self._owners |= dict.fromkeys(requests, key)
        try:
            self._add(prompt, requests)
        except BaseException:
            self.cancel(key)
            raise

    def step(self) -> list[Finished]:
        if not self._groups:
            return []
        finished: list[Finished] = []
        prompts = {name: self._groups[key].prompt for name, key in self._owners.items()}
        for name, completion, prefilled in self._advance(prompts):
            self.prefilled += prefilled
            key = self._owners.pop(name)
            group = self._groups[key]
            group.completions[name] = completion
            if group.split:
                finished.append((SampleKey(key, group.names.index(name)), [completion]))
            if len(group.completions) == len(group.names):
                del self._groups[key]
                if not group.split:
                    finished.append((key, [group.completions[name] for name in group.names]))
        return finished

    def cancel(self, key: Hashable) -> None:
        if (group := self._groups.pop(key, None)) is not None:
            names = [name for name in group.names if self._owners.pop(name, None) is not None]
            self._abort(names)

    def close(self) -> None:
        names = list(self._owners)
        self._groups.clear()
        self._owners.clear()
        self._abort(names)
