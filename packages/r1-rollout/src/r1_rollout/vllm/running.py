"""A pending call to `generate` that can be ended with a reason."""

from collections.abc import Generator, Iterator

from r1_rollout.types import Completion


class Running:
    """An iterator of finished groups. Once it has been ended, asking for more raises the reason."""

    def __init__(self, groups: Generator[tuple[int, list[Completion]], None, None]) -> None:
        self._groups = groups
        self._done, self._over = False, ""

    def __iter__(self) -> Iterator[tuple[int, list[Completion]]]:
        return self

    def __next__(self) -> tuple[int, list[Completion]]:
        if self._over:
            raise RuntimeError(self._over)
        try:
            return next(self._groups)
        except BaseException:  # the last group has come, or there will be none
            self._done = True
            raise

    def close(self) -> None:
        self._done = True
        self._groups.close()

    def end(self, reason: str) -> None:
        """Abandon unfinished groups; a consumer who asks for more gets the reason."""
        if not self._done:
            self._over = reason
        self._groups.close()
