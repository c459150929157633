"""The built-in tools, and schemas of functions."""

import io
import math
import random
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import PIL.Image
import pytest
from environment_files import call, open_pool, opened
from loopback import answering

from r1_rewards.environments.results import truncate_texts
from r1_rewards.environments.schema import check_arguments, function_schema, read_docstring
from r1_rewards.environments.shapes import load
from r1_rewards.environments.tools.calculator import calculator
from r1_rewards.environments.tools.crop import crop
from r1_rewards.environments.tools.python import print_last_value
from r1_rewards.environments.types import EnvironmentSpecError


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(3 + 4) * 2 ** 10", "7168"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("2^10", "1024"),
        ("-7 // 2", "-4"),
        ("sqrt(2) * pi", "4.44288293816"),
        ("factorial(20)", "2432902008176640000"),
        ("10**30", "1" + "0" * 30),
        ("round(2.567, 2)", "2.57"),
        ("max(1, 2, 3) ÷ 2", "1.5"),
    ],
)
def test_the_calculator_computes(expression, result):
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("9**9**9**9", "too large"),
        ("2**100000", "too large"),
        ("factorial(10**6)", "not computed"),
        ("__import__('os').system('true')", "only numbers"),
        ("(1).__class__", "only numbers"),
        ("open('x')", "'open' is not known"),
        ("x + 1", "'x' is not known"),
        ("[1, 2]", "only numbers"),
        ("True + 1", "only numbers"),
        ("'a' * 10", "only numbers"),
        ("1 +", "no arithmetic expression"),
        ("(-8) ** 0.5", "not a real number"),
        ("(" * 300 + "1" + ")" * 300, "no arithmetic expression"),
        ("-" * 500 + "1", "nested too deeply|no arithmetic expression"),
        ("1" * 2000, "2000 characters"),
        ("lambda: 1", "only numbers"),
    ],
)
def test_the_calculator_refuses(expression, message):
    with pytest.raises(ValueError, match=message):
        calculator(expression)


def test_the_calculator_agrees_with_python_on_random_expressions():
    choose = random.Random(1)

    def make(depth):
        if depth == 0:
            return str(choose.choice([choose.randint(0, 99), round(choose.uniform(0, 9), 2)]))
        return f"({make(depth - 1)} {choose.choice('+-*/')} {make(depth - 1)})"

    for _ in range(200):
        expression = make(choose.randint(1, 4))
        try:
            expected = eval(expression)
        except ZeroDivisionError:
            with pytest.raises(ZeroDivisionError):
                calculator(expression)
        else:
            assert math.isclose(float(calculator(expression)), expected, rel_tol=1e-11, abs_tol=1e-11)


def test_crop_shows_the_named_part_enlarged():
    picture = PIL.Image.new("RGB", (100, 50))
    picture.paste((255, 0, 0), (50, 0, 100, 25))
    part = crop(0.5, 0, 1, 0.5, images=[picture])
    assert part.size == (100, 50)
    assert part.getcolors() == [(5000, (255, 0, 0))]
    assert crop(0, 0, 0.001, 1, images=[picture], side=500).size == (10, 500)
    for corners in ((0.5, 0, 0.5, 1), (0, 0, 1.1, 1), (-0.1, 0, 1, 1), (math.nan, 0, 1, 1)):
        with pytest.raises(ValueError, match="0 <= x0"):
            crop(*corners, images=[picture])
    with pytest.raises(ValueError, match="no picture 2; there are 1"):
        crop(0, 0, 1, 1, 2, images=[picture])


def passages(body, path, headers):
    assert (path, headers["content-type"]) == ("/retrieve", "application/json")
    if body == b"broken":
        return 500, {}
    return 200, {"result": [[{"document": {"contents": f'"Title {n}"\ntext {n}'}, "score": 1.0} for n in range(5)]]}


def test_built_in_tools_run_as_any_other():
    with (
        answering(passages) as url,
        open_pool(
            "calculator", "crop", "python", "search", tool_kwargs={"search": {"url": f"{url}/retrieve", "topk": 2}}
        ) as pool,
    ):
        names = [tool["function"]["name"] for tool in pool.tools]
        assert names == ["calculator", "crop", "python", "search"]
        assert all(tool["function"]["description"] for tool in pool.tools)
        parameters = [set(tool["function"]["parameters"]["properties"]) for tool in pool.tools]
        assert parameters == [{"expression"}, {"x0", "y0", "x1", "y1", "picture"}, {"code"}, {"query"}]
        opened(pool, {"url": "none", "timeout": 9}, [PIL.Image.new("L", (40, 40), 7)])
        assert call(pool, "calculator", expression="6*7")[1] == "42"
        assert call(pool, "calculator", expression="6*")[1] == "error: ValueError: this is no arithmetic expression"
        part = call(pool, "crop", x0=0, y0=0, x1=0.5, y1=0.5)[1][0]
        assert PIL.Image.open(io.BytesIO(part["image"])).size == (40, 40)
        assert (
            call(pool, "search", query="\ud800x")[1]
            == 'Doc 1(Title: "Title 0") text 0\nDoc 2(Title: "Title 1") text 1\n'
        )
        for code, output in (
            ("print(1)\n2 + 2", "1\n4\n"),
            ("x = 5", ""),
            ("a = [1]\na.append(2)\na", "[1, 2]\n"),
            ("print('a')\n1/0", "a\n\nerror: ZeroDivisionError: division by zero (line 2)"),
            ("1/0", "error: ZeroDivisionError: division by zero (line 1)"),
            ("import socket; socket.socket()", "error: "),
            ("def f(", "error: SyntaxError: "),
            ("import sys; sys.exit(4)", "error: the program ended with code 4"),
        ):
            content = call(pool, "python", code=code)[1]
            assert content.startswith(output) if output.endswith(": ") else content == output


def test_the_python_tool_ends_programs_that_never_end():
    with open_pool("python", tool_kwargs={"python": {"timeout": 0.5}}) as pool:
        opened(pool)
        content = call(pool, "python", code="print('x', flush=True)\nwhile True: pass")[1]
        assert content == "x\n\nerror: the program ran longer than 0.5 s"
        assert call(pool, "python", code="1 + 1")[1] == "2\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, {}), "OSError: the search server answered 500"),
        ((404, {}), "OSError: the search server answered 404"),
        ((200, b"not json"), "JSONDecodeError"),
        ((200, {"result": []}), "ValueError: the search server's answer has no passages"),
        ((302, {}, {"location": "http://127.0.0.1:1/"}.items()), "OSError: the search server answered 302"),
        ((200, None), "OSError: the search server cannot be reached"),
    ],
)
def test_a_search_server_that_fails_becomes_an_error_text(monkeypatch, answer, message):
    from r1_rewards.environments.tools import search

    monkeypatch.setattr(search, "PAUSE", 0.01)
    with answering(lambda *_: answer) as url, pytest.raises((OSError, ValueError)) as caught:
        search.search("x", url=url)
    assert message in f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("code", "changed"),
    [
        ("x", True), ("print(x)", False), ("x = 1", False), ("if x:\n    y", False), ("é = 1; é", True), ("", False),
        ("f(\n  1,\n)  # comment", True), ("a = 1\n(a,\n a)", True), ("def f(", False),
    ],
)  # fmt: skip
def test_the_last_expression_of_a_program_is_printed(code, changed):
    assert (print_last_value(code) != code) == changed
    if changed:
        compile(print_last_value(code), "x", "exec")


class Colour(Enum):
    RED = "red"


class Point(TypedDict):
    x: int


def example(
    a: int, b: float = 1.0, c: str | None = None, d: Literal["x", "y"] = "x", e: list[int] | None = None,
    f: dict[str, float] | None = None, g: bool | None = None, h: "Sequence[str]" = (), i: Colour = Colour.RED,
    j: int | str = 1, k: Any = None, o: Annotated[int, "x"] = 1, m: Point | None = None, n: tuple[int, str] = (1, ""),
    *, image: Any, row: Any = None,
) -> "Unknown":  # noqa: F821  # fmt: skip
    """Do it."""


def test_types_become_json_types():
    properties = function_schema(example)["function"]["parameters"]["properties"]
    assert properties == {
        "a": {"type": "integer"}, "b": {"type": "number"}, "c": {"type": "string", "nullable": True},
        "d": {"type": "string", "enum": ["x", "y"]},
        "e": {"type": "array", "items": {"type": "integer"}, "nullable": True},
        "f": {"type": "object", "additionalProperties": {"type": "number"}, "nullable": True},
        "g": {"type": "boolean", "nullable": True}, "h": {"type": "array", "items": {"type": "string"}},
        "i": {"type": "string", "enum": ["red"]},
        "j": {"type": ["integer", "string"]}, "k": {}, "o": {"type": "integer"},
        "m": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "nullable": True},
        "n": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"a": 1, "d": "z"}, "'d' must be one of 'x', 'y', not 'z'"),
        ({"a": 1, "e": [1, "x"]}, r"'e\[1\]' must be an integer, not 'x'"),
        ({"a": 1, "f": {"x": "y"}}, "'f.x' must be a number, not 'y'"),
        ({"a": 1, "n": [1]}, "'n' must have 2 items, not 1"),
        ({"a": 1, "m": {}}, "'m' lacks 'x'"),
        ({"a": 1, "j": 1.5}, "'j' must be an integer or text, not 1.5"),
        ({"a": 1, "b": 10**400}, "'b' must be a number, not 1000"),
        ({"a": None}, "'a' must be an integer, not None"),
        ({"a": 1, "image": "x"}, "there is no parameter 'image'"),
    ],
)
def test_arguments_of_other_types_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        check_arguments(arguments, function_schema(example)["function"]["parameters"])


def test_arguments_are_converted_where_that_loses_nothing():
    parameters = function_schema(example)["function"]["parameters"]
    found = check_arguments({"a": 2.0, "b": 3, "c": None, "e": [1.0], "j": "x", "k": [{}]}, parameters)
    assert found == {"a": 2, "b": 3.0, "c": None, "e": [1], "j": "x", "k": [{}]}
    assert [type(found["a"]), type(found["b"]), type(found["e"][0])] == [int, float, int]


def google(x: int, y: str = "a"):
    """Find a thing.

    It goes on here.

    Args:
        x: The first,
            which has two lines.
        y (str, optional): The second: with a colon.

    Returns:
        Nothing.
    """


def numpy_style(x: int, y: str = "a"):
    """Find a thing.

    Parameters
    ----------
    x : int
        The first,
        which has two lines.
    y : str, optional
        The second: with a colon.

    Returns
    -------
    None
    """


def sphinx(x: int, y: str = "a"):
    """Find a thing.

    :param x: The first, which has two lines.
    :param str y: The second: with a colon.
    :returns: nothing
    """


@pytest.mark.parametrize("function", [google, numpy_style, sphinx])
def test_docstrings_of_three_styles_are_read(function):
    schema = function_schema(function)["function"]
    assert schema["description"] == ("Find a thing.\n\nIt goes on here." if function is google else "Find a thing.")
    assert {name: value["description"] for name, value in schema["parameters"]["properties"].items()} == {
        "x": "The first, which has two lines.",
        "y": "The second: with a colon.",
    }


def test_schemas_are_those_that_transformers_writes():
    def tool(x: int, y: list[str] | None = None, z: Literal["a", "b"] = "a", w: int | float = 1):
        """Find a thing.

        Args:
            x: The first.
            y: The second,
                on two lines.
            z: The third.
            w: The fourth.
        """

    properties = {  # by transformers.utils.get_json_schema of 5.16
        "x": {"type": "integer", "description": "The first."},
        "y": {
            "type": "array", "items": {"type": "string"}, "nullable": True, "description": "The second, on two lines.",
        },
        "z": {"type": "string", "enum": ["a", "b"], "description": "The third."},
        "w": {"type": ["integer", "number"], "description": "The fourth."},
    }  # fmt: skip
    parameters = {"type": "object", "properties": properties, "required": ["x"]}
    function = {"name": "tool", "description": "Find a thing.", "parameters": parameters}
    assert function_schema(tool) == {"type": "function", "function": function}


def test_a_parameter_that_json_cannot_hold_is_refused_by_name():
    def tool(x: complex): ...

    with pytest.raises(EnvironmentSpecError, match="'tool': parameter 'x' has the type <class 'complex'>"):
        function_schema(tool)
    assert read_docstring("") == ("", {})


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_texts_are_truncated_on_the_named_side(side):
    choose = random.Random(side)
    for _ in range(300):
        texts = ["".join(choose.choices("abcdef", k=choose.randint(0, 12))) for _ in range(choose.randint(1, 4))]
        whole, limit = "".join(texts), choose.randint(1, 30)
        found, left_out = truncate_texts(texts, limit, side)
        mark = f"…[{left_out} characters left out]…"
        assert left_out == max(0, len(whole) - limit)
        assert len(found) == len(texts)
        if not left_out:
            assert found == texts
            continue
        head, tail = "".join(found).split(mark)
        assert len(head + tail) == limit
        assert whole.startswith(head)
        assert whole.endswith(tail)
        assert (side == "left") <= (head == "")
        assert (side == "right") <= (tail == "")


@pytest.mark.parametrize(
    ("code", "rewards"),
    [
        ("def look(self) -> str: ...", False),
        ("async def look(self) -> 'str | None': ...", False),
        ("def look(self) -> int | None: ...", False),
        ("def look(self): ...", True),
        ("def look(self) -> 'Observation': ...", True),
        ("def look(self) -> tuple: ...", True),
        ("def look(self) -> str: ...\n    def buy(self): ...", True),
        ("def reset(self, row): ...\n    def step(self, text) -> str: ...", True),
    ],
)
def test_an_environment_without_a_score_gives_no_reward_if_its_methods_are_annotated_so(
    code: str, rewards: bool, tmp_path: Path
) -> None:
    file = tmp_path / "shop.py"
    file.write_text(f"class Shop:\n    {code}\n")
    assert load({"environment": f"{file}:Shop", "environment_kwargs": {}}).rewards == rewards
