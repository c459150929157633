"""The reference-probability reward: splice references into responses and read their log-probs (arXiv 2506.18254)."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from r1_cli.train.groups.group import SampledInput
from r1_data.types import Prompt
from r1_rewards.reference.options import Options
from r1_rewards.reference.reference_probability import BASE_COLUMN, LOG_HALF, combine
from r1_rewards.reference.splice import Tokenizer
from r1_rewards.reference.tokens import CAUSES, Cause, Spliced, splice_tokens
from r1_rewards.types import Failure, FailureRule, RewardInput, Score
from r1_rewards.verifiers import repetition
from r1_rollout.types import Reading

REPEATED = 10  # words of a repeated n-gram, and how often it may occur


@dataclass(frozen=True, slots=True)
class ModelQuery:
    reading: Reading
    tokenizer: Tokenizer
    eos: str
    temperature: float
    longest: int  # tokens of prompt and response that the model knows
    longest_response: int  # tokens
    rule: FailureRule  # what happens to responses that the model could not read


@dataclass(slots=True)
class ReferenceVerifier:
    """Scores a sampling round in one model call, by the formula of `r1_rewards.reference.reference_probability`.

    `query` is set after the models are loaded. Other parts of a score: `unscored_CAUSE` per cause, `no_score_a` if
    debiasing lacks a base score, and `repetition`.
    """

    options: Options
    query: ModelQuery | None = None
    base_of: Callable[[Prompt], float | None] = field(default=lambda prompt: column_score(prompt))

    @property
    def per_sample(self) -> bool:
        return self.query is not None and self.query.reading.concurrent

    def __call__(self, inputs: Sequence[RewardInput]) -> list[Score]:
        """Raises RuntimeError if `query` is not set."""
        if self.query is None:
            raise RuntimeError("reference_probability cannot score before its model is loaded")
        sampled = [item for item in inputs if isinstance(item, SampledInput) and item.rendered and item.completion]
        if len(sampled) < len(inputs):
            raise RuntimeError("reference_probability needs the tokens of responses, which this call lacks")
        spliced = [self._splice(item, self.query) for item in sampled]
        found = self._ask(sampled, spliced, self.query)
        scores = [self._judge(*one) for one in zip(sampled, spliced, found, strict=True)]
        return [self.query.rule.apply("reference_probability", *one) for one in enumerate(scores)]

    def _splice(self, item: SampledInput, query: ModelQuery) -> Spliced | Cause:
        assert item.completion is not None
        assert item.rendered is not None
        options = self.options
        tokens = item.completion.token_ids.tolist()
        found = splice_tokens(
            tokens, item.ground_truth, query.tokenizer, eos=query.eos, mode=options.format_mode, rule=options.rule
        )
        if isinstance(found, str):
            return found
        if options.rule == "strict":  # the fork scores what is left of an answer that it has cut
            room = query.longest_response - found.kept
            scored = [place for place in found.scored if place < room]
            found = replace(found, ids=found.ids[: max(room, 0)], scored=scored)
        fits = len(item.rendered.token_ids) + found.kept + len(found.ids) <= query.longest
        return found if fits and found.scored else "length"

    def _ask(
        self, sampled: Sequence[SampledInput], spliced: Sequence[Spliced | Cause], query: ModelQuery
    ) -> list[list[float]]:
        asking = [
            (item.rendered, [*item.completion.token_ids.tolist()[: one.kept], *one.ids], one)
            for item, one in zip(sampled, spliced, strict=True)
            if isinstance(one, Spliced) and item.rendered and item.completion
        ]
        rows = iter(
            query.reading.read_logprobs(
                [prompt for prompt, _, _ in asking],
                [response for _, response, _ in asking],
                [one.kept for _, _, one in asking],
                query.temperature,
            )
            if asking
            else []
        )
        return [self._picked(one, next(rows)) if isinstance(one, Spliced) else [] for one in spliced]

    def _picked(self, spliced: Spliced, logprobs: Sequence[float]) -> list[float]:
        if not logprobs:
            return []
        picked = [logprobs[place] for place in spliced.scored]
        after = spliced.scored[-1] + 1
        if self.options.one_more_token and after < len(logprobs):
            picked.append(min(logprobs[after], LOG_HALF))
        return picked

    def _judge(self, item: SampledInput, spliced: Spliced | Cause, logprobs: Sequence[float]) -> Score | Failure:
        assert item.rendered is not None
        if isinstance(spliced, Spliced) and not logprobs:
            return Failure("remote", REASONS["silence"])
        options = self.options
        base = self.base_of(item.rendered) if options.use_debiasing else None
        found = combine(logprobs, item.response, base or 0.0, options)
        cause: Cause | None = spliced if isinstance(spliced, str) else None
        if cause is None and (found.parts["unscored"] or not all(map(math.isfinite, found.parts.values()))):
            cause = "number"
            found = combine([], item.response, base or 0.0, options)
        if not math.isfinite(found.value):  # a shaping of nothing that is not finite either
            found = Score(0.0, {**found.parts, "probability": 0.0})
        value, parts = found.value, dict(found.parts)
        if options.repetition_penalty:
            parts["repetition"] = repetition.score(item.response, ngram=REPEATED, limit=REPEATED).value
            value += parts["repetition"]
        parts |= {f"unscored_{name}": float(name == cause) for name in CAUSES if name != "silence"} | {"overall": value}
        if options.use_debiasing:
            parts["no_score_a"] = float(base is None)
        return Score(value, parts, reason=REASONS[cause] if cause else "")


def column_score(prompt: Prompt) -> float | None:
    """Return the base score in a prompt's row; None without a finite number."""
    found: object = prompt.metadata.get(BASE_COLUMN)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        return None
    return float(found)


REASONS: dict[Cause, str] = {
    "form": "the response has no place for the reference answer",
    "reference": "the reference answer is empty",
    "length": "the response with the reference answer is longer than the model takes",
    "number": "the reference answer's log-probs are not finite",
    "silence": "the model returned no log-probs",
}
