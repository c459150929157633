"""Send results through a pipe between processes without copying arrays into the pickle.

A message is the number of its parts and their sizes, eight bytes each, then the parts: a pickle, and its arrays.
"""

import io
import os
import pickle
import struct
import time
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any


def send(pipe: "Connection[object, object]", message: object) -> None:
    """Send an object whose arrays are contiguous. Raises BrokenPipeError if the reader is gone."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    ForkingPickler(head, 5, True, buffers.append).dump(message)
    parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    for part in (memoryview(sizes), *parts):
        while part.nbytes:
            part = part[os.write(pipe.fileno(), part) :]


def receive(pipe: "Connection[object, object]", seconds: float) -> Any:
    """Raises EOFError if the sender ended early, TimeoutError after `seconds`."""
    deadline = time.monotonic() + seconds
    (count,) = struct.unpack("<Q", _read(pipe, 8, deadline))
    sizes = struct.unpack(f"<{count}Q", _read(pipe, 8 * count, deadline))
    head, *buffers = [_read(pipe, size, deadline) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _read(pipe: "Connection[object, object]", size: int, deadline: float) -> memoryview:
    import numpy

    buffer = numpy.empty(size, numpy.uint8)
    rest = buffer.data
    while rest.nbytes:
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        count = os.readv(pipe.fileno(), [rest])
        if count == 0:
            raise EOFError
        rest = rest[count:]
    return buffer.data
