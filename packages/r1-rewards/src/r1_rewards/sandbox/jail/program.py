"""Run a judged program as `__main__`: it reads stdin, prints, and ends; its output is compared elsewhere."""

import atexit
import os
import sys
import threading
from types import ModuleType
from typing import Any, NoReturn


def run_program(request: dict[str, Any]) -> NoReturn:
    """Run `request["source"]` and end as the interpreter would, without its tidying up, which takes longer than a run.

    Threads that are no daemons are waited for, then functions registered with `atexit` run, as programs with fast
    output of their own expect.
    """
    sys.argv = ["solution.py"]
    code = 0
    try:
        execute(request["source"], new_module("__main__"))
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 1
    os._exit(code & 0xFF)


def new_module(name: str) -> ModuleType:
    """Put a new, empty module into `sys.modules`, where dataclasses and typing look for it."""
    module = ModuleType(name)
    sys.modules[name] = module
    return module


def execute(source: str, module: ModuleType) -> None:
    """Execute `source` as the module's code.

    The one place where judged code and tests are executed; the process around it has been confined by `confinement`.
    """
    exec(compile(source, f"{module.__name__}.py", "exec"), vars(module))
