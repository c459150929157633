"""How the threads of one process wait for one another, set before torch is loaded."""

import os

# Rounds that a waiting OpenMP thread spins before it sleeps. The default, about 300,000, holds a processor for
# milliseconds: harmless alone, but where anything else runs beside it, a step of small models takes 30 times as long.
SPINS = "10000"


def share_processors() -> None:
    """Let waiting threads give up their processor soon, unless the user has said how they should wait."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
