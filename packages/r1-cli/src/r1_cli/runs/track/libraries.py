"""What libraries have to say while a run goes on: kept in a file, so that the terminal shows the run."""

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
    """A file that is there, with its folder, as soon as there is something to write into it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def _open(self) -> TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


@contextmanager
def quiet(path: Path) -> Iterator[None]:
    """Inside the block warnings and messages of libraries are added to a file, and not shown."""
    file = LaterFile(path)
    with ExitStack() as stack:
        stack.callback(file.close)
        for name in LIBRARIES:
            stack.callback(_give_to(file, logging.getLogger(name)))
        logging.captureWarnings(True)
        stack.callback(logging.captureWarnings, False)
        yield


def _give_to(file: logging.Handler, logger: logging.Logger) -> Callable[[], None]:
    """Let a file have all that a logger has to say; return what undoes it."""
    before, propagates = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [file], False

    def undo() -> None:
        logger.handlers, logger.propagate = before, propagates

    return undo
