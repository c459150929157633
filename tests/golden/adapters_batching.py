"""From golden case names to our sequence balancing and to the masks of trained tokens."""

import torch
from torch.nn.functional import pad

from r1_core.learner.batching import balance
from r1_core.learner.microbatch import collate
from r1_core.types import Sample


def partition(inputs, params, case):
    return {"partitions": balance(inputs["lengths"], params["k"], params["equal_size"])}


def response_mask(inputs, params, case):
    """Our engines stop at the first end token, so a sample never has any after it; the adapter cuts there for them.

    What remains is what `collate` does: a mask over rows of different lengths. It is as wide as the longest answer.
    """
    ends = torch.tensor(params["eos_token_id"]).reshape(-1)
    rows = inputs["response_ids"]
    samples = []
    for row in rows:
        stops = torch.isin(row, ends).nonzero().flatten().tolist()
        ids = torch.cat([row.new_zeros(1), row[: stops[0] + 1 if stops else len(row)]])
        places = torch.arange(len(ids))
        samples.append(Sample(ids, places > 0, places[None], group_id=0, reward=0.0))
    mask = collate(samples, padding_free=True).loss_mask
    return {"mask": pad(mask, (0, rows.shape[1] - mask.shape[1])).long()}


ALGOS = {"partition": partition, "response_mask": response_mask}
