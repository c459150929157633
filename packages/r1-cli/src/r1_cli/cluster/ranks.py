"""The processes of a learner as the driver asks them, whatever started them."""

from typing import Any, Protocol

from r1_cli.cluster.batch import Put, Reference
from r1_cli.cluster.direct import Ask


class Ranks(Protocol):
    """Processes that hold a `Rank` each, wherever they are.

    What a verb raises in one of them is raised here as what it was, with a note of where; the ranks are of no use then.
    """

    def ask(self, verb: str, *args: Any, label: str = "") -> Any:
        """Call a method of every rank with the same arguments; return rank 0's result. Messages call it `label`."""

    def ask_all(self, verb: str, *args: Any, label: str = "") -> list[Any]:
        """Do as `ask`, and return what every rank answers, in their order."""

    def put(self, value: Any) -> Reference:
        """Put a value down where every rank can read it, and the arrays in it without a copy."""

    @property
    def putter(self) -> Put:
        """What puts a value down where it is called, in a rank, say: it pickles."""

    @property
    def caller(self) -> Ask:
        """What asks the first of them from another of the cluster's processes: it pickles."""

    def close(self) -> None:
        """Let all ranks end."""
