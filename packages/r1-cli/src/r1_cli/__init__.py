"""r1 train, r1 merge, r1 eval: one run, from a config to a checkpoint."""

from importlib.metadata import version

__all__: list[str] = []  # a command: nothing is imported from here


def __getattr__(name: str) -> str:
    if name == "__version__":
        return version("r1-cli")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "__version__"])
