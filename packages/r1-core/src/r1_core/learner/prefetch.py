"""Model inputs that lie elsewhere are read while the micro-batch before is computed."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, pairwise

from r1_core.types import Sample


def prefetch(batches: Iterable[list[Sample]]) -> Iterator[list[Sample]]:
    """Yield this rank's micro-batches; when one comes its model inputs are here, and the next one's on their way.

    No more than that one are read ahead, and those of other ranks never. An error of reading is raised where the
    micro-batch would have come.
    """
    with ThreadPoolExecutor(1, "r1-model-inputs") as thread:  # without anything elsewhere it never begins
        coming: Future[None] | None = None
        for batch, after in pairwise(chain(batches, [[]])):
            if coming is None:
                read(batch)
            else:
                coming.result()
            coming = thread.submit(read, after) if any(map(elsewhere, after)) else None
            yield batch


def elsewhere(sample: Sample) -> bool:
    """Whether a sample's model inputs may have to be brought: a dict holds its tensors itself."""
    return bool(sample.model_inputs) and not isinstance(sample.model_inputs, dict)


def read(samples: Sequence[Sample]) -> None:
    """Read all model inputs, so that those which are loaded when first read are loaded."""
    for sample in samples:
        for name in sample.model_inputs if elsewhere(sample) else ():
            sample.model_inputs[name]
