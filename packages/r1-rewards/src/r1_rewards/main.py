"""The `r1-rewards` command: `serve` a verifier over HTTP, or `score` a file of responses."""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from r1_rewards.load import load
from r1_rewards.services.remote import TOKEN_VARIABLE
from r1_rewards.services.serve import MARKERS, RequestLimits, require_token, serve
from r1_rewards.spec import SERVICES
from r1_rewards.types import RewardInput, RewardSpecError
from r1_rewards.verifiers import BUILTINS, truth_problem

DESCRIPTION = f"""Offer a verifier over HTTP: POST /get_reward as OpenRLHF and LMM-R1 ask, POST /score, GET /health.

SPEC is {", ".join((*BUILTINS, *SERVICES))} or path/file.py:function. Other addresses than loopback
need a token of at least 16 characters in the environment variable {TOKEN_VARIABLE}."""

SCORE = "Score each line of a JSON lines file; print it with its value, parts, what was extracted and why."


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.command == "score":
        return score_file(options.spec, options.file, options.kwargs, options.timeout, options.workers)
    token = os.environ.get(TOKEN_VARIABLE) or None
    limits = RequestLimits(options.max_bytes, options.max_answers, options.max_characters, options.max_requests)
    try:
        require_token(options.host, token)
        verifier = load(
            options.spec,
            options.kwargs,
            timeout=options.timeout,
            failure_score=options.failure_score,
            workers=options.workers,
        )
        print(f"r1-rewards: serving {options.spec} on http://{options.host}:{options.port}", file=sys.stderr)
        serve(
            verifier,
            host=options.host,
            port=options.port,
            token=token,
            limits=limits,
            response_after=options.response_after,
        )
    except (RewardSpecError, ValueError, TypeError) as error:
        print(f"r1-rewards: {error}", file=sys.stderr)
        return 2
    return 0


def score_file(spec: str, file: str, kwargs: dict[str, object], timeout: float, workers: int) -> int:
    try:
        lines = Path(file).read_text("utf-8-sig").split("\n")  # and at no other sign: JSON may hold U+2028 as it is
        rows = [_read_row(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        with load(spec, kwargs, timeout=timeout, workers=workers) as verifier:
            scores = verifier(rows)
    except (OSError, RewardSpecError, ValueError, TypeError) as error:
        print(f"r1-rewards: {error}", file=sys.stderr)
        return 2
    problems = [
        truth_problem(spec, row.ground_truth, kwargs, row.metadata) if spec in BUILTINS and score.value <= 0 else None
        for row, score in zip(rows, scores, strict=True)
    ]
    for row, score, problem in zip(rows, scores, problems, strict=True):
        told = {"value": score.value, "parts": dict(score.parts), "extracted": score.extracted, "reason": score.reason}
        failed = {"error": f"{score.error.cause}: {score.error.message}"} if score.error else {}
        failed |= {"truth_problem": problem} if problem else {}
        given = {"response": row.response, "ground_truth": row.ground_truth, **row.metadata}
        print(json.dumps({**given, **told, **failed}))
    failures, unusable = sum(score.error is not None for score in scores), sum(map(bool, problems))
    mean = sum(score.value for score in scores) / len(scores) if scores else 0.0
    useless = f", {unusable} with a truth of no use" if unusable else ""
    print(f"r1-rewards: {len(scores)} responses, mean {mean:.4g}, {failures} failed{useless}", file=sys.stderr)
    return 0


def _read_row(number: int, line: str) -> RewardInput:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} is not JSON: {error}") from error
    if not isinstance(row, dict) or not {"response", "ground_truth"} <= row.keys():
        raise ValueError(f"line {number} needs 'response' and 'ground_truth', it is {line[:80]!r}")
    for key in ("response", "ground_truth"):
        several = key == "ground_truth" and isinstance(row[key], list) and all(isinstance(one, str) for one in row[key])
        if not isinstance(row[key], str) and not several:
            raise ValueError(
                f"line {number}: {key!r} is {row[key]!r:.80}, a {type(row[key]).__name__}; write it as text"
            )
    known = {field.name for field in dataclasses.fields(RewardInput)}
    others = {key: value for key, value in row.items() if key not in known}
    return RewardInput(**{**{key: row[key] for key in row if key in known}, "metadata": others})


def _add_score(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("spec", metavar="SPEC")
    add("file", metavar="FILE", help="JSON lines with response and ground_truth; further keys are columns of the row")
    add("--kwargs", type=json_object, default={}, metavar="JSON", help="keywords of the reward function")
    add("--workers", type=int, default=1, help="worker processes; default: %(default)s")
    add("--timeout", type=float, default=30.0, help="seconds per response; default: %(default)s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("r1-rewards")
    parser.add_argument("--version", action="version", version=importlib.metadata.version("r1-rewards"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    _add_score(commands.add_parser("score", help="score a file of responses", description=SCORE))
    command = commands.add_parser(
        "serve",
        help="offer a verifier over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits = RequestLimits()
    add = command.add_argument
    add("spec", metavar="SPEC")
    add("--kwargs", type=json_object, default={}, metavar="JSON", help="keywords of the reward function")
    add("--host", default="127.0.0.1", help="default: %(default)s")
    add("--port", type=int, default=5000, help="default: %(default)s")
    add("--workers", type=int, default=1, help="worker processes; default: %(default)s")
    add("--timeout", type=float, default=30.0, help="seconds per response; default: %(default)s")
    add("--failure-score", type=float, default=0.0, help="of a response that cannot be scored; default: %(default)s")
    add("--response-after", metavar="TEXT", help=f"where a query's response begins: a text, or {', '.join(MARKERS)}")
    add("--max-bytes", type=int, default=limits.body_bytes, help="per request; default: %(default)s")
    add("--max-answers", type=int, default=limits.answers, help="per request; default: %(default)s")
    add("--max-characters", type=int, default=limits.characters, help="per string; default: %(default)s")
    add("--max-requests", type=int, default=limits.requests, help="at a time; default: %(default)s")
    return parser


def json_object(text: str) -> dict[str, object]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object, as in {{"weight": 0.5}}, got {text}')
    return value


if __name__ == "__main__":
    sys.exit(main())
