"""A calculator: arithmetic with numbers, evaluated node by node within limits."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 1000
MAX_DEPTH = 60
MAX_BITS = 4096  # of an integer
MAX_FACTORIAL = 500

Number = int | float

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("acos", "asin", "atan", "atan2", "ceil", "comb", "cos", "degrees", "exp", "factorial", "floor", "gcd",
                 "lcm", "log", "log10", "log2", "perm", "radians", "sin", "sqrt", "tan", "trunc")
} | {"abs": abs, "max": max, "min": min, "round": round}  # fmt: skip
_WHOLE = ("comb", "factorial", "perm")  # grow fast


def calculator(expression: str) -> str:
    """Compute an arithmetic expression, for example (3 + 4.5) * 2 ** 10 / sqrt(7).

    Args:
        expression: Numbers with + - * / // % **, parentheses, pi, e, and functions such as sqrt, log, sin, round.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters, more than {MAX_CHARACTERS}")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("this is no arithmetic expression") from error
    return _written(_evaluate(tree.body, MAX_DEPTH))


def _evaluate(node: ast.expr, depth: int) -> Number:
    if depth == 0:
        raise ValueError("the expression is nested too deeply")
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _checked(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _checked(_UNARY[type(op)](_evaluate(operand, depth - 1)))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            first, second = _evaluate(left, depth - 1), _evaluate(right, depth - 1)
            if isinstance(op, ast.Pow):
                _check_power(first, second)
            return _checked(_BINARY[type(op)](first, second))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            values = [_evaluate(argument, depth - 1) for argument in arguments]
            if name in _WHOLE and any(abs(value) > MAX_FACTORIAL for value in values):
                raise ValueError(f"{name} of more than {MAX_FACTORIAL} is not computed")
            return _checked(_FUNCTIONS[name](*values))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            raise ValueError(f"{name!r} is not known")
    raise ValueError("only numbers, + - * / // % **, parentheses and functions are computed")


def _check_power(base: Number, exponent: Number) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MAX_BITS:
        raise ValueError("the power is too large")


def _checked(value: object) -> Number:
    if isinstance(value, complex):
        raise ValueError("the result is not a real number")
    if not isinstance(value, int | float):
        raise ValueError("the result is not a number")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise ValueError("the number is too large")
    return value


def _written(value: Number) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.12g}" if isinstance(value, float) else str(value)
