"""Results through a pipe between two processes: arrays go as they lie in memory, behind the rest.

A picture's pixels are nearly all of a result. `Connection.send` copies them into a pickle, `Connection.recv` gathers
them in pieces and copies them twice more; here they are written from where they are and read to where they stay.
"""

import io
import os
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


def send(pipe: "Connection[Any, Any]", message: Any) -> None:
    """Send an object whose arrays are contiguous. Raises BrokenPipeError if nobody listens any more."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    ForkingPickler(head, 5, True, buffers.append).dump(message)
    parts = [buffer.raw() for buffer in buffers]
    pipe.send((head.getvalue(), [part.nbytes for part in parts]))
    for part in parts:
        while part.nbytes:
            part = part[os.write(pipe.fileno(), part) :]


def receive(pipe: "Connection[Any, Any]") -> Any:
    """Return what `send` sent. Raises EOFError if the other side ends, before or amid it."""
    import numpy

    head, sizes = pipe.recv()
    buffers = [numpy.empty(size, numpy.uint8) for size in sizes]
    for buffer in buffers:
        rest = buffer.data
        while rest.nbytes:
            count = os.readv(pipe.fileno(), [rest])
            if count == 0:
                raise EOFError
            rest = rest[count:]
    return pickle.loads(head, buffers=buffers)
