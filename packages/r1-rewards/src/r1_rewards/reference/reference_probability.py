"""Score a response by how probable its reasoning makes the reference answer (RLPR, arXiv 2506.18254).

The reward needs the policy's log-probs, so it runs in the process that has them instead of in a worker.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import SupportsFloat

from r1_rewards.reference.shaping import aggregate, bins, shaping
from r1_rewards.reference.splice import Context, Mode, Rule, Splice, Tokenizer, splice, splice_alone
from r1_rewards.types import RewardInput, Score, check_inputs
from r1_rewards.verifiers import format as response_format

# From (prompts [N], ids that follow each prompt [N][R]) to the log-probs of these ids [N][R], at the temperature of
# sampling, without gradient, under the policy before the update.
LogProbs = Callable[[Sequence[str], Sequence[list[int]]], Sequence[Sequence[float]]]

LOG_HALF = math.log(0.5)
BASE_COLUMN = "scoreA"  # the column of the data in which a base score may already stand


@dataclass(frozen=True, slots=True)
class Settings:
    """How log-probs become a reward; the defaults are RLPR's.

    With w = `format_weight`, p the shaped probability, and f = 1 for a good format, the reward is (1 − w) p + w f; with
    w = −1 it is p, or −1 for a bad format. p is bins(shape(d)), with d the aggregated log-probs minus the base score,
    clipped to [0, 1] if `clip`.
    """

    format_weight: float = 0.1
    format_mode: Mode = "r1"
    aggregation: str = "mean_exp_log_softmax"
    shaping_function_name: str = "threshold_0"
    discrete_function_name: str = "identity"
    use_debiasing: bool = True
    clip: bool = True
    rule: Rule = "lenient"
    one_more_token: bool = False  # score the token after the reference too, at most log 0.5 for its log-prob
    eos: str = ""  # the tokenizer's end-of-sequence text

    def __post_init__(self) -> None:
        aggregate([], self.aggregation)
        shaping(self.shaping_function_name)
        bins(self.discrete_function_name)
        if not (0.0 <= self.format_weight <= 1.0 or self.format_weight == -1.0):
            raise ValueError(f"format_weight is {self.format_weight}; it must be from 0 to 1, or -1")


def score(
    response: str,
    ground_truth: str,
    *,
    logprobs: LogProbs,
    tokenizer: Tokenizer,
    prompt: str = "",
    base_score: float = 0.0,
    settings: Settings | None = None,
) -> Score:
    """Score one response; see `ReferenceProbability` for a batch.

    Example: `score("<think>6*7</think><answer>41</answer>", "42", logprobs=policy, tokenizer=tokenizer, prompt="6*7?")`
    """
    settings = settings or Settings()
    item = RewardInput(response, ground_truth, prompt=prompt, metadata={BASE_COLUMN: base_score})
    return ReferenceProbability(logprobs, tokenizer, settings)([item])[0]


@dataclass
class ReferenceProbability:
    """A batch verifier: one call of `logprobs` scores all responses.

    A sample's base score is its column "scoreA", or 0; `base_scores` computes it. A base score that is not finite
    raises ValueError. Parts: `probability` (p), `score_b` (with reasoning), `score_a` (base), `delta` (score_b minus
    score_a), `format`, `unscored` (1 if the answer could not be replaced or a log-prob was not a number; score_b is
    then 0).
    """

    logprobs: LogProbs
    tokenizer: Tokenizer
    settings: Settings = field(default_factory=Settings)

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        check_inputs(inputs)
        settings, bases = self.settings, [_base_score(*numbered) for numbered in enumerate(inputs)]
        splices = [
            splice(
                item.response, item.ground_truth, self.tokenizer,
                eos=settings.eos, mode=settings.format_mode, rule=settings.rule,
            )
            for item in inputs
        ]  # fmt: skip
        found = self._reference_logprobs([item.prompt for item in inputs], splices, settings.one_more_token)
        return [
            combine(logprobs, item.response, base, settings)
            for item, logprobs, base in zip(inputs, found, bases, strict=True)
        ]

    def base_scores(
        self, prompts: Sequence[str], references: Sequence[str], context: Context = "tagged"
    ) -> list[float]:
        """Return the aggregated probability of each reference without reasoning, under the current policy.

        Compute it once before training, with the reward's tokenizer, temperature and aggregation.
        """
        splices = [
            splice_alone(
                reference, self.tokenizer, eos=self.settings.eos, context=context, mode=self.settings.format_mode
            )
            for reference in references
        ]
        found = self._reference_logprobs(prompts, splices, one_more_token=False)
        return [aggregate(logprobs, self.settings.aggregation) for logprobs in found]

    def _reference_logprobs(
        self, prompts: Sequence[str], splices: Sequence[Splice | None], one_more_token: bool
    ) -> list[list[float]]:
        asked = [(prompt, item) for prompt, item in zip(prompts, splices, strict=True) if item is not None]
        rows = iter(self.logprobs([prompt for prompt, _ in asked], [item.ids for _, item in asked]) if asked else [])
        found: list[list[float]] = []
        for item in splices:
            if item is None:
                found.append([])
                continue
            row = next(rows)
            if len(row) != len(item.ids):
                raise ValueError(f"logprobs returned {len(row)} numbers for a row of {len(item.ids)} tokens")
            picked = [float(row[place]) for place in item.scored]
            if one_more_token and item.scored[-1] + 1 < len(row):
                picked.append(min(float(row[item.scored[-1] + 1]), LOG_HALF))
            found.append(picked)
        return found


def _base_score(number: int, item: RewardInput) -> float:
    found = item.metadata.get(BASE_COLUMN)
    if found is None:
        return 0.0
    if isinstance(found, bool | str) or not isinstance(found, SupportsFloat) or not math.isfinite(found):
        raise ValueError(
            f"the column {BASE_COLUMN!r} of input {number} is {found!r:.80}, not a finite number; write null where "
            "there is no base score"
        )
    return float(found)


def combine(logprobs: Sequence[float], response: str, base_score: float, settings: Settings) -> Score:
    score_b = aggregate(logprobs, settings.aggregation)
    if settings.rule == "strict" and logprobs:  # the fork's own bounds, by which a NaN is worth most
        score_b = 1.0 if math.isnan(score_b) else min(max(score_b, 0.0), 1.0)
    unscored = not logprobs or math.isnan(score_b) or score_b == math.inf
    score_b = 0.0 if unscored else score_b
    base_score = base_score if settings.use_debiasing else 0.0
    difference = score_b - base_score
    delta = min(max(difference, 0.0), 1.0) if settings.clip else difference
    shape, rounded = shaping(settings.shaping_function_name), bins(settings.discrete_function_name)
    probability = rounded(shape(delta))
    good = response_format.score(response, mode=settings.format_mode).value
    weight = settings.format_weight
    overall = (1.0 - weight) * probability + weight * good
    if weight == -1.0 and settings.rule != "strict":
        overall = probability if good else -1.0
    parts = {"format": good, "probability": probability, "score_b": score_b, "score_a": base_score}
    parts["delta"] = difference
    return Score(overall, {"overall": overall, **parts, "unscored": float(unscored)})


def prompted_format(response: str, prompt: str, mode: Mode = "r1") -> float:
    r"""Return 1 for the form that the prompt asks for: its answer tags, or a `\boxed{…}`, or nothing at all."""
    if "<answer>" in prompt and "</answer>" in prompt:
        return response_format.score(response, mode=mode).value
    if r"\boxed{" in prompt:
        box = response.find(r"\boxed{")
        return float(box >= 0 and response.find("}", box) >= 0)
    return 1.0
