"""Score instruction following by IFEval's 25 rules (arXiv 2311.07911)."""

import json
from collections.abc import Mapping, Sequence

from r1_rewards.reading import extract
from r1_rewards.reading.instructions import follows, rule_problem
from r1_rewards.types import Score

TAKES = ("instruction_id_list", "kwargs")  # columns of google/IFEval
TRUTH_IS_ANSWER = False  # but rules

Rules = list[tuple[str, Mapping[str, object]]]


def score(
    response: str,
    ground_truth: str,
    *,
    instruction_id_list: Sequence[str] | None = None,
    kwargs: Sequence[Mapping[str, object]] | None = None,
    loose: bool = False,
    share: bool = False,
) -> Score:
    """Return 1 if the response follows all rules of its row, else 0; with `share`, the share that it follows.

    The rules are in the columns `instruction_id_list` and `kwargs`, or in the ground truth as JSON with these keys. An
    empty response follows none; a thought is left out. `loose` also accepts a response that follows a rule without its
    first line, its last line, both, or its asterisks.

    Parts: `strict` and `loose` (all rules followed), and the counts `instructions`, `followed` and `followed_loose`:
    their sums over rows give IFEval's accuracy per instruction. Sentences are counted by rules of English, languages
    found by py3langid (extra `ifeval`), where the published figures come from NLTK's model and langdetect. Raises
    ValueError for unknown rules and missing arguments, ImportError without py3langid.

    Example: `score("No", '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}').value` is 1.0.
    """
    rules = read_rules(ground_truth, instruction_id_list, kwargs)
    text = extract.after_thought(response).strip("\n")
    strict = [follows(rule, text, arguments) for rule, arguments in rules]
    variants = loose_variants(text)
    loosely = [
        done or any(follows(rule, variant, arguments) for variant in variants)
        for done, (rule, arguments) in zip(strict, rules, strict=True)
    ]
    counted = loosely if loose else strict
    accuracy = float(all(counted))
    value = sum(counted) / len(counted) if share else accuracy
    parts = {
        "overall": value, "accuracy": accuracy, "strict": float(all(strict)), "loose": float(all(loosely)),
        "instructions": float(len(rules)), "followed": float(sum(strict)), "followed_loose": float(sum(loosely)),
    }  # fmt: skip
    missed = [rule for done, (rule, _) in zip(counted, rules, strict=True) if not done]
    return Score(value, parts, reason=f"not followed: {', '.join(missed)}" if missed else "all rules followed")


def truth_problem(
    ground_truth: str,
    *,
    instruction_id_list: Sequence[str] | None = None,
    kwargs: Sequence[Mapping[str, object]] | None = None,
) -> str | None:
    try:
        rules = read_rules(ground_truth, instruction_id_list, kwargs)
    except ValueError as error:
        return str(error)
    return next((problem for rule, arguments in rules if (problem := rule_problem(rule, arguments))), None)


def read_rules(
    ground_truth: str, names: Sequence[str] | None = None, arguments: Sequence[Mapping[str, object]] | None = None
) -> Rules:
    """Return the rules of a row with their arguments; those of other rules are null."""
    if names is None:
        try:
            read = json.loads(ground_truth)
        except (ValueError, RecursionError):
            read = None
        if not isinstance(read, Mapping) or "instruction_id_list" not in read:
            raise ValueError(
                "the row has no column 'instruction_id_list', and its ground truth is no JSON with that key: "
                f"{ground_truth[:80]!r}"
            )
        names, arguments = read["instruction_id_list"], read.get("kwargs")
    listed = [{} for _ in names] if arguments is None else [dict(one or {}) for one in arguments]
    if not names or len(names) != len(listed):
        raise ValueError(f"the row has {len(names)} rules and {len(listed)} kwargs; there must be as many, and some")
    return list(zip(names, listed, strict=True))


def loose_variants(text: str) -> list[str]:
    lines = text.split("\n")
    parts = [text, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys([*parts, *(part.replace("*", "") for part in parts)]))
