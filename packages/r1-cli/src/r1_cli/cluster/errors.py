"""What ends a run on many devices beside the errors of one process."""


class ClusterError(RuntimeError):
    """Part of the run is gone, or does not answer; the message names it, its machine and its log."""
