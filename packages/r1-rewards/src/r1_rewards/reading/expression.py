"""Parse a plain algebraic expression into SymPy without evaluating it: numbers, letters, + - * / ^ ! and functions."""

import re
from typing import Any

MAX_CHARACTERS = 300
MAX_DEPTH = 24

_TOKEN = re.compile(
    r"\s*(?:([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+)|([^\W\d_]+)|(\*\*|[-+*/^!(),]))"
)
_FUNCTIONS = (
    "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln",
    "exp", "abs",
)  # fmt: skip
_GREEK = (
    "alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "mu", "nu", "xi", "rho",
    "sigma", "tau", "phi", "chi", "psi", "omega",
)  # fmt: skip
_WORD = re.compile("|".join((*sorted(_FUNCTIONS, key=len, reverse=True), "pi", *_GREEK, ".")))


class Unreadable(ValueError):
    pass


def parse(text: str) -> Any:
    """Return the SymPy expression. Raises Unreadable.

    A missing sign is a product ("2x", "xy"). Check the text with `guards.refusal` first: SymPy computes powers and
    factorials of numbers at once.
    """
    if len(text) > MAX_CHARACTERS:
        raise Unreadable(f"{len(text)} characters, more than {MAX_CHARACTERS}")
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if parser.next is not None:
        raise Unreadable(f"{parser.next!r} is left over")
    return value


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position = 0
    text = text.strip()
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable(f"{text[position]!r} is not part of an expression")
        number, word, sign = match.groups()
        # Words that are no function and no Greek letter are products of letters.
        tokens += _WORD.findall(word) if word else [number or sign]
        position = match.end()
    return tokens


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        import sympy

        self.sympy = sympy
        self.tokens = tokens
        self.place = 0
        self.depth = 0

    @property
    def next(self) -> str | None:
        return self.tokens[self.place] if self.place < len(self.tokens) else None

    def take(self, *wanted: str) -> str | None:
        token = self.next
        if token is None or (wanted and token not in wanted):
            return None
        self.place += 1
        return token

    def sum(self) -> Any:
        value = self.product()
        while sign := self.take("+", "-"):
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> Any:
        value = self.signed()
        while (token := self.next) is not None and token not in ("+", "-", ")", ",", "!"):
            if self.take("/"):
                value = value / self.signed()
            else:
                self.take("*")
                value = value * self.signed()
        return value

    def signed(self) -> Any:
        if sign := self.take("-", "+"):
            self.deeper()
            value = -self.signed() if sign == "-" else self.signed()
            self.depth -= 1
            return value
        return self.power()

    def power(self) -> Any:
        value = self.atom()
        while self.take("!"):
            value = self.sympy.factorial(value)
        if self.take("^", "**"):
            self.deeper()
            value = value ** self.signed()
            self.depth -= 1
        return value

    def atom(self) -> Any:
        token = self.take()
        if token == "(":
            return self.bracketed()
        if token is None or token in (")", ",", "*", "/", "^", "**", "!"):
            raise Unreadable(f"{token!r} where a number or letter should be")
        if token[0].isdigit() or token[0] == ".":
            exact = token.isdigit()
            return self.sympy.Integer(int(token)) if exact else self.sympy.Float(token)
        return self.named(token)

    def named(self, token: str) -> Any:
        constants = {"pi": self.sympy.pi, "E": self.sympy.E, "I": self.sympy.I}
        if token in constants:
            return constants[token]
        if token in _FUNCTIONS:
            argument = self.bracketed() if self.take("(") else self.power()
            name = {"abs": "Abs", "ln": "log"}.get(token, token)
            return getattr(self.sympy, name)(argument)
        return self.sympy.Symbol(token)

    def bracketed(self) -> Any:
        self.deeper()
        value = self.sum()
        if not self.take(")"):
            raise Unreadable("a bracket is not closed")
        self.depth -= 1
        return value

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable(f"nested deeper than {MAX_DEPTH}")
