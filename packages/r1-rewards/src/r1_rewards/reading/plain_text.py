r"""Convert text to plain characters: digits of other scripts to ASCII, LaTeX such as `\frac{a}{b}` to a/b."""

import re
import unicodedata

MAX_DEPTH = 24

INVISIBLE = dict.fromkeys(
    map(ord, "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u202a\u202b\u202c\u202d\u202e\ufeff"), ""
)
_TABLE = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {0x3000: " "} | INVISIBLE
_DIGIT = re.compile(r"(?![0-9])\d")
_TOKEN = re.compile(r"\\([A-Za-z]+)\s*|\\(.)|([{}])|([^\\])", re.DOTALL)
_SYMBOLS = {
    "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*", "le": "≤", "leq": "≤", "ge": "≥", "geq": "≥",
    "ne": "≠", "neq": "≠", "pm": "±", "in": "∈", "cap": "∩", "emptyset": "∅", "circ": "∘", "approx": "≈", "div": "÷",
    "alpha": "α", "beta": "β", "gamma": "γ", "theta": "θ", "lambda": "λ", "mu": "μ", "phi": "ϕ", "ldots": "…", "dots":
    "…", "cdots": "⋯", "log": "log", "ln": "ln", "sin": "sin", "cos": "cos", "tan": "tan", "exp": "exp", "quad": "  ",
    "int": "∫", "sum": "∑", "to": "→",
}  # fmt: skip


def plain_characters(text: str) -> str:
    r"""Return `text` with ASCII for full-width characters and digits of any script, without invisible characters."""
    if text.isascii():
        return text
    return _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), text.translate(_TABLE))


def latex_to_text(latex: str) -> str:
    """Return `latex` as plain text without unknown commands. Raises ValueError for unbalanced or deep braces."""
    text = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac")
    reader = _Reader([match.groups() for match in _TOKEN.finditer(text)])
    return reader.text(0).strip()


class _Reader:
    def __init__(self, tokens: list[tuple[str, ...]]) -> None:
        self.tokens = tokens
        self.place = 0

    def text(self, depth: int) -> str:
        if depth > MAX_DEPTH:
            raise ValueError("braces nested too deeply")
        written: list[str] = []
        while self.place < len(self.tokens):
            if self.tokens[self.place][2] == "}":
                if depth == 0:
                    raise ValueError("a brace closes nothing")
                return "".join(written)
            written.append(self.item(depth))
        if depth:
            raise ValueError("a brace is not closed")
        return "".join(written)

    def item(self, depth: int) -> str:
        command, escaped, brace, character = self.tokens[self.place]
        self.place += 1
        if brace == "{":
            inside = self.text(depth + 1)
            self.place += 1
            return inside
        if command == "frac":
            return f"{self.argument(depth)}/{self.argument(depth)}"
        if command in ("begin", "end"):
            matrix = self.argument(depth).endswith("matrix")
            return ("[ " if command == "begin" else " ]") if matrix else ""
        if command == "mbox":
            self.argument(depth)
            return ""
        if command == "sqrt":
            self.skip_option()
            return f"sqrt({self.argument(depth)})"
        if command is not None:
            return _SYMBOLS.get(command, "")
        if escaped is not None:
            return {",": " ", ";": " ", ":": " ", "!": "", "\\": "; "}.get(escaped, escaped)
        return character or ""

    def argument(self, depth: int) -> str:
        while self.place < len(self.tokens) and (self.tokens[self.place][3] or "").isspace():
            self.place += 1
        if self.place >= len(self.tokens) or self.tokens[self.place][2] == "}":
            raise ValueError("a command lacks its argument")
        return self.item(depth)

    def skip_option(self) -> None:
        if self.place < len(self.tokens) and self.tokens[self.place][3] == "[":
            while self.place < len(self.tokens) and self.tokens[self.place][3] != "]":
                self.place += 1
            self.place += 1
