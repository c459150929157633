"""What the README says of the verifiers is so."""

import ast
import re
from pathlib import Path

import pytest

import r1_rewards
from r1_rewards.spec import SERVICES
from r1_rewards.verifiers import BUILTINS

README = Path(__file__).resolve().parents[1] / "README.md"
ROWS = re.findall(r"^\| (`.*?`) \|.*\| (?:`([^|]*)`|see below) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
EXAMPLES = [example for _, example in ROWS if example]


def test_every_row_names_a_verifier_and_the_services_have_rows():
    named = {name for names, _ in ROWS for name in re.findall(r"`(\w+)`", names)}
    assert named <= {*BUILTINS, *SERVICES, "reference_probability"}
    assert named >= {*SERVICES, "reference_probability"}


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_gives_what_it_says(example):
    """An example is `module.score(literals).value == number`; it is read, not run as code."""
    comparison = ast.parse(example, mode="eval").body
    call = comparison.left.value
    module = getattr(r1_rewards, call.func.value.id)
    arguments = [ast.literal_eval(argument) for argument in call.args]
    options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    found = module.score(*arguments, **options).value
    assert found == pytest.approx(ast.literal_eval(comparison.comparators[0]))
