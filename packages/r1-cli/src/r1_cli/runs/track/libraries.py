"""Redirect libraries' warnings and messages to a file."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import TextIOWrapper
from pathlib import Path

LOG_FILE = Path("logs/driver.log")  # in the run's folder
# Those that a run loads. What users' own code logs is shown as it would be anywhere.
LIBRARIES = (
    "accelerate", "asyncio", "bitsandbytes", "datasets", "fsspec", "httpcore", "httpx", "huggingface_hub", "matplotlib",
    "peft", "PIL", "py.warnings", "ray", "tensorboard", "torch", "torchvision", "transformers", "urllib3",
)  # fmt: skip


class LaterFile(logging.FileHandler):
    """A log file that the first message creates, with its folder."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


@contextmanager
def redirect_library_logs(path: Path) -> Iterator[None]:
    """Append libraries' warnings and messages to a file inside the block, instead of printing them."""
    file = LaterFile(path)
    with ExitStack() as stack:
        stack.callback(file.close)
        for name in LIBRARIES:
            stack.callback(_redirect(file, logging.getLogger(name)))
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        yield


def _redirect(file: logging.Handler, logger: logging.Logger) -> Callable[[], None]:
    before, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [file], False

    def undo() -> None:
        logger.handlers, logger.propagate = before, propagates

    return undo
