"""Base scores (ScoreA): the probability of each reference answer without reasoning, computed once per run.

A file has a line with the `ScoreTerms`, then one score per line. It grows as scores are found, so that an interrupted
computation continues. Rows may have scores in a column, with their terms in another.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from r1_cli.build.rewards.reference_verifier import ModelQuery
from r1_data.types import Prompt
from r1_rewards.reference.options import Options
from r1_rewards.reference.shaping import aggregate
from r1_rewards.reference.splice import Context, Splice, splice_alone
from r1_rewards.types import RewardFailure

TERMS_COLUMN = "scoreA_terms"  # the terms of a row's base score, as JSON
AT_ONCE = 64  # prompts between two writes

log = logging.getLogger("r1")


@dataclass(frozen=True, slots=True)
class ScoreTerms:
    """What base scores depend on; scores with different terms must not be compared.

    Example: `ScoreTerms("Qwen/Qwen2.5-7B", 1.0, "mean_exp_log_softmax", "r1", "tagged")`.
    """

    model: str
    temperature: float
    aggregation: str
    format_mode: str
    context: Context

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def problem(self, written: str) -> str | None:
        """Return how the terms in the JSON `written` differ from these; None if they agree.

        Only the last part of a model's path counts, as folders differ between machines.
        """
        try:
            other = json.loads(written)
        except ValueError:
            other = None
        if not isinstance(other, dict):
            return f"{TERMS_COLUMN} is {written[:80]!r}, which `r1 score-a` has not written"
        mine, theirs = asdict(self), {**other, "model": Path(str(other.get("model"))).name}
        mine["model"] = Path(self.model).name
        differing = [
            f"{key}={theirs.get(key)!r} and not {value!r}" for key, value in mine.items() if theirs.get(key) != value
        ]
        return ", ".join(differing) or None


def terms_of(options: Options, model: str, temperature: float) -> ScoreTerms:
    """Return the terms of a reward's base scores. RLPR's own tool ignores the temperature."""
    temperature = 1.0 if options.rule == "strict" else temperature
    return ScoreTerms(model, temperature, options.aggregation, options.format_mode, context_of(options))


def context_of(options: Options) -> Context:
    return "suffix" if options.rule == "strict" else "tagged"


def key_of(prompt: Prompt) -> str:
    text = f"{prompt.text}\0{prompt.ground_truth}".encode("utf-8", "surrogatepass")
    return f"{prompt.source}/{prompt.id}#{hashlib.blake2b(text, digest_size=6).hexdigest()}"


class BaseScoreFile:
    def __init__(self, path: Path, terms: ScoreTerms) -> None:
        """Read the file, or start it. Raises ValueError if its terms differ."""
        self.path, self._scores = path, dict[str, float | None]()
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(terms.to_json() + "\n", encoding="utf-8")
            return
        whole = path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]  # a line that a kill truncated is computed again
        if len(kept) < len(whole):
            path.write_bytes(kept)
        first, *lines = kept.decode("utf-8").splitlines() or [""]
        if different := terms.problem(first):
            raise ValueError(f"{path} has base scores with {different}")
        self._scores.update(json.loads(line) for line in lines)

    def __contains__(self, key: str) -> bool:
        return key in self._scores

    def rows(self) -> dict[str, float | None]:
        return {key.rpartition("#")[0]: score for key, score in self._scores.items()}

    def get(self, key: str) -> float | None:
        return self._scores.get(key)

    def add(self, scores: Mapping[str, float | None]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps([key, score]) + "\n" for key, score in scores.items())
        self._scores.update(scores)


def fill_bases(file: BaseScoreFile, prompts: Iterable[Prompt], query: ModelQuery, options: Options) -> None:
    missing = (prompt for prompt in prompts if key_of(prompt) not in file)
    odd = 0
    for share in _shares(missing):
        scores = base_scores(share, query, options)
        odd += scores.count(None)
        file.add({key_of(prompt): score for prompt, score in zip(share, scores, strict=True)})
    if odd:
        log.warning(
            "%d rows have no base score: their reference is empty or too long, or its log-probs are not finite", odd
        )


def base_scores(prompts: Sequence[Prompt], query: ModelQuery, options: Options) -> list[float | None]:
    """Return the base score of each prompt, or None. Raises RewardFailure if the model returns no log-probs."""
    alone = [_alone(prompt, query, options) for prompt in prompts]
    given = [(prompt, one) for prompt, one in zip(prompts, alone, strict=True) if one]
    found = (
        query.reading.read_logprobs(
            [prompt for prompt, _ in given], [one.ids for _, one in given], [0] * len(given), query.temperature
        )
        if given
        else []
    )
    if silent := sum(not row for row in found):
        raise RewardFailure(
            f"the model returned no log-probs of {silent} in {len(found)} reference answers. Scores found so far are "
            "saved: make sure that the model answers, and run the same command again"
        )
    rows = iter(found)
    return [_base(one, next(rows), options) if one else None for one in alone]


def _alone(prompt: Prompt, query: ModelQuery, options: Options) -> Splice | None:
    found = splice_alone(
        prompt.ground_truth, query.tokenizer,
        eos=query.eos, context=context_of(options), mode=options.format_mode,
    )  # fmt: skip
    fits = found is not None and found.scored and len(prompt.token_ids) + len(found.ids) <= query.longest
    return found if fits else None


def _base(alone: Splice, logprobs: Sequence[float], options: Options) -> float | None:
    found = aggregate([logprobs[place] for place in alone.scored], options.aggregation)
    if not math.isfinite(found):
        return None
    return min(max(found, 0.0), 1.0) if options.rule == "strict" else found


def _shares(prompts: Iterable[Prompt]) -> Iterator[list[Prompt]]:
    prompts = iter(prompts)
    while share := list(islice(prompts, AT_ONCE)):
        yield share
