"""Run Python code in the sandbox. Each call is a program of its own."""

import ast
import atexit
import re

from r1_rewards.sandbox.execution import Execution, Sandbox, SandboxLimits

_LINE = re.compile(r'^ {2}File "__main__.py", line (\d+)', re.MULTILINE)  # of the program, not of a library
_sandbox: Sandbox | None = None  # of this process


def python(code: str, *, timeout: float = 10.0, memory_mib: int = 1024) -> str:
    """Run a Python program and return what it prints. It may import the standard library.

    Args:
        code: The program. If its last line is an expression, its value is printed, too.
    """
    global _sandbox
    code = code.encode("utf-8", "replace").decode()
    if _sandbox is None:
        _sandbox = Sandbox(SandboxLimits(memory_mib=memory_mib, cpu_seconds=timeout))
        atexit.register(_sandbox.close)
    try:
        execution = _sandbox.run(print_last_value(code), b"", timeout)
    except BaseException:
        _sandbox.close()
        _sandbox = None
        raise
    return describe(execution, timeout)


def print_last_value(code: str) -> str:
    """Return the program with its last line printed, if that is an expression with a value."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return code  # the program's own error tells more
    if not tree.body or not isinstance(last := tree.body[-1], ast.Expr):
        return code
    if isinstance(last.value, ast.Call) and isinstance(last.value.func, ast.Name) and last.value.func.id == "print":
        return code
    lines = code.encode().splitlines(keepends=True)
    begin = b"".join(lines[: last.lineno - 1]) + lines[last.lineno - 1][: last.col_offset]
    expression = ast.get_source_segment(code, last.value) or ""
    return f"{begin.decode()}__import__('sys').displayhook(({expression}\n))\n"


def describe(execution: Execution, timeout: float) -> str:
    output = execution.stdout.decode("utf-8", "replace")
    if execution.ending == "timeout":
        return f"{output}\nerror: the program ran longer than {timeout:g} s".lstrip()
    if execution.ending == "output":
        return f"{output}\nerror: the program printed too much".lstrip()
    if execution.code == 0:
        return output
    errors = execution.stderr.decode("utf-8", "replace").strip()
    last = errors.splitlines()[-1] if errors else f"the program ended with code {execution.code}"
    lines = _LINE.findall(errors)
    where = f" (line {lines[-1]})" if lines else ""
    return f"{output}\nerror: {last}{where}".lstrip()
