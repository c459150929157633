"""The `r1-rewards` command: `r1-rewards serve SPEC` offers a verifier over HTTP."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from r1_rewards.load import load
from r1_rewards.services.remote import TOKEN_VARIABLE
from r1_rewards.services.serve import MARKERS, Limits, require_token, serve
from r1_rewards.spec import BUILTINS, SERVICES, RewardSpecError

DESCRIPTION = f"""Offer a verifier over HTTP: POST /get_reward as OpenRLHF and LMM-R1 ask, POST /score, GET /health.

SPEC is {", ".join((*BUILTINS, *SERVICES))} or path/file.py:function. Other addresses than loopback
need a token of at least 16 characters in the environment variable {TOKEN_VARIABLE}."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 when stopped, 2 with one line on stderr for what cannot work."""
    options = _parser().parse_args(arguments)
    token = os.environ.get(TOKEN_VARIABLE) or None
    limits = Limits(options.max_bytes, options.max_answers, options.max_characters, options.max_requests)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("r1-rewards")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser(
        "serve",
        help="offer a verifier over HTTP",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    limits = Limits()
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


def json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object, as in {{"weight": 0.5}}, got {text}')
    return value


if __name__ == "__main__":
    sys.exit(main())
