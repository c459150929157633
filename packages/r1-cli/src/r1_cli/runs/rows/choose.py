"""Choose among sampled answers: examples of fine-tuning, pairs of preference, pass rates. Pure functions of groups."""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Literal

from r1_cli.runs.history import JsonObject
from r1_cli.runs.statistics import wilson

Kind = Literal["sft", "pairs", "rates"]
Keep = Literal["best", "all", "shortest", "random"]

FEWEST = 0.05  # share of the groups below which a choice is refused, unless it is asked for
BINS = 10  # of the histogram, between the rates 0 and 1


class ChoiceError(ValueError):
    """A choice that leaves nothing, or next to nothing; the message has a histogram of pass rates."""


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    sample: int
    text: str
    tokens: int
    score: float
    right: bool
    cut: bool = False  # by the limit of tokens
    cause: str = ""  # why it could not be scored
    turns: tuple[JsonObject, ...] = ()  # messages of an episode; none for a single answer
    pictures: tuple[Path, ...] = ()  # of the turns, in order
    parts: Mapping[str, float] = field(default_factory=dict)  # of the score

    @property
    def failed(self) -> bool:
        return bool(self.cause)

    @property
    def messages(self) -> list[JsonObject]:
        return [*self.turns] if self.turns else [{"role": "assistant", "content": self.text}]


@dataclass(frozen=True, slots=True)
class SampledGroup:
    prompt_id: str
    source: str
    key: str
    answers: tuple[SampledAnswer, ...]
    block: int = 0
    place: int = 0  # in the block
    prompt_tokens: int = 0
    prompt: str = ""  # as the model read it

    @property
    def scored(self) -> list[SampledAnswer]:
        return [answer for answer in self.answers if not answer.failed]

    @property
    def pass_rate(self) -> float | None:
        """The share of right answers; None if none could be scored."""
        return fmean(answer.right for answer in self.scored) if self.scored else None


@dataclass(frozen=True, slots=True)
class Choice:
    """What to choose. `seed` is of the choices by lot."""

    kind: Kind = "sft"
    keep: Keep = "best"
    per_row: int | None = None  # examples or pairs; None: 1, or with keep=all no limit
    band: tuple[float, float] | None = None  # of pass rates, ends included
    margin: float = 0.0  # least difference of the scores of a pair; it is above 0 in any case
    keep_cut: bool = False  # choose answers, too, that the limit of tokens cut
    few: bool = False  # accept that next to nothing is left
    seed: int = 0

    @property
    def most(self) -> int | None:
        return self.per_row if self.per_row is not None or self.keep == "all" else 1


def parse_band(text: str | None) -> tuple[float, float] | None:
    """Read `0.1:0.9`. Raises ChoiceError."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 0 <= low <= high <= 1:
        raise ChoiceError(f"--band {text!r} must be two pass rates from 0 to 1, such as 0.1:0.9")
    return low, high


@dataclass(frozen=True, slots=True)
class Chosen:
    """One chosen row: an answer, a pair of answers, or neither."""

    group: SampledGroup
    chosen: SampledAnswer | None = None
    rejected: SampledAnswer | None = None


def choose(groups: Sequence[SampledGroup], choice: Choice) -> list[Chosen]:
    """Return the chosen rows, in the order of the groups.

    Raises:
        ChoiceError: nothing is left, or less than FEWEST of the groups.
    """
    if not groups:
        raise ChoiceError("there are no answers yet: run r1 sample")
    chosen = [one for group in groups for one in choose_of_group(group, choice)]
    left = len({id(one.group) for one in chosen})
    if not left or (left < FEWEST * len(groups) and not choice.few):
        told = "nothing is left" if not left else f"{left} of {len(groups)} rows are left; --few accepts that"
        raise ChoiceError(f"{told}\n{histogram(groups)}")
    return chosen


def choose_of_group(group: SampledGroup, choice: Choice) -> list[Chosen]:
    rate = group.pass_rate
    if rate is None or (choice.band and not choice.band[0] <= rate <= choice.band[1]):
        return []
    if choice.kind == "rates":
        return [Chosen(group)]
    candidates = usable(group, choice)
    if choice.kind == "pairs":
        return [Chosen(group, *pair) for pair in pair_best(candidates, choice.margin, choice.most)]
    right = [answer for answer in candidates if answer.right]
    if choice.keep == "shortest":
        right.sort(key=lambda answer: (answer.tokens, -answer.score, answer.sample))
    elif choice.keep == "random":
        right.sort(key=lambda answer: draw(choice.seed, group, answer))
    else:
        right.sort(key=lambda answer: (-answer.score, answer.tokens, answer.sample))
    return [Chosen(group, answer) for answer in right[: choice.most]]


def usable(group: SampledGroup, choice: Choice) -> list[SampledAnswer]:
    """Return the scored answers, each text once. Cut ones are left out, unless they are to be kept."""
    unique = dict[str, SampledAnswer]()
    for answer in group.scored:
        if choice.keep_cut or not answer.cut:
            unique.setdefault(answer.text if not answer.turns else repr(answer.turns), answer)
    return [*unique.values()]


def pair_best(
    answers: Sequence[SampledAnswer], margin: float, most: int | None
) -> Iterator[tuple[SampledAnswer, SampledAnswer]]:
    """Yield the best with the worst answer, the second best with the second worst, …"""
    ordered = sorted(answers, key=lambda answer: (-answer.score, answer.tokens, answer.sample))
    count = len(ordered) // 2 if most is None else min(most, len(ordered) // 2)
    for place in range(count):
        chosen, rejected = ordered[place], ordered[-1 - place]
        if chosen.score > rejected.score and chosen.score - rejected.score >= margin:
            yield chosen, rejected


def control(groups: Sequence[SampledGroup], choice: Choice, count: int) -> list[Chosen]:
    """Return `count` rows by lot, whatever the answers' scores: what the choice is to be compared with.

    Fewer if there are not as many. As in the choice, a text is used once a row, and `per_row` limits the rows of a
    group.
    """
    drawn = list[tuple[bytes, Chosen]]()
    for group in groups:
        if choice.kind == "rates":
            drawn.append((draw(choice.seed, group), Chosen(group)))
            continue
        order = sorted(usable(group, choice), key=lambda answer: draw(choice.seed, group, answer))
        if choice.kind == "pairs":
            pairs = list(zip(order[::2], order[1::2], strict=False))[: choice.most]
            drawn += [(draw(choice.seed, group, one), Chosen(group, one, other)) for one, other in pairs]
        else:
            drawn += [(draw(choice.seed, group, one), Chosen(group, one)) for one in order[: choice.most]]
    lots = {id(one) for _, one in sorted(drawn, key=lambda pair: pair[0])[:count]}
    return [one for _, one in drawn if id(one) in lots]


def draw(seed: int, group: SampledGroup, answer: SampledAnswer | None = None) -> bytes:
    """Return a lot that depends on (seed, row, answer) alone."""
    named = f"{seed}:{group.source}:{group.prompt_id}:{'' if answer is None else answer.sample}"
    return hashlib.blake2b(named.encode(errors="surrogatepass"), digest_size=16).digest()


def statistics(group: SampledGroup) -> JsonObject:
    """Return the columns of `rates`: the pass rate with Wilson's 95 % interval, and the lengths of the answers."""
    scored = group.scored
    found = wilson(fmean(answer.right for answer in scored), len(scored)) if scored else None
    return {
        "pass_rate": None if found is None else found.value,
        "asked": len(scored),
        "interval": None if found is None else [found.low, found.high],
        "mean_tokens": fmean(answer.tokens for answer in group.answers),
        "share_cut": fmean(answer.cut for answer in group.answers),
    }


def histogram(groups: Iterable[SampledGroup]) -> str:
    """Return a line for each range of pass rates, with its number of rows."""
    rates = [group.pass_rate for group in groups]
    names = ["0", *(f"{i / BINS:g} to {(i + 1) / BINS:g}" for i in range(BINS)), "1", "not scored"]
    counts = Counter(
        "not scored" if rate is None else f"{rate:g}" if rate in (0, 1) else names[1 + math.floor(rate * BINS)]
        for rate in rates
    )
    longest = max(counts.values(), default=1)
    lines = [
        f"  {name:>10}  {counts[name]:>7}  {'#' * math.ceil(40 * counts[name] / longest)}".rstrip()
        for name in names
        if counts[name]
    ]
    return "\n".join(["rows by pass rate:", *lines])
