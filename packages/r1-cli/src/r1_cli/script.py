"""Find out whether worker processes would run a script again from its beginning."""

import ast
import multiprocessing
import sys
from pathlib import Path
from types import FrameType

GUARD = (
    "{} is run again by every worker process, and would start the run again there: put the call below "
    '`if __name__ == "__main__":`, or set {} so that no such process is needed'
)


def require_main_guard(settings: str) -> None:
    """Raise RuntimeError if the caller stands in a script outside `if __name__ == "__main__":`.

    Python's own way to start a process imports the main script. `settings` would make such processes unnecessary.
    """
    main = sys.modules["__main__"]
    file = vars(main).get("__file__")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself finds out
        raise RuntimeError(GUARD.format(vars(sys.modules["__mp_main__"]).get("__file__", "the script"), settings))
    if not file or not Path(file).is_file():  # a notebook, an interactive session, `python -c`
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    if frame is not None and not _is_guarded(ast.parse(Path(file).read_bytes()), frame.f_lineno):
        raise RuntimeError(GUARD.format(file, settings))


def _is_guarded(tree: ast.Module, line: int) -> bool:
    """Whether this line stands in the body of an `if` that looks at `__name__`."""
    return any(
        isinstance(node, ast.If)
        and any(isinstance(name, ast.Name) and name.id == "__name__" for name in ast.walk(node.test))
        and node.body[0].lineno <= line <= (node.body[-1].end_lineno or line)
        for node in ast.walk(tree)
    )
