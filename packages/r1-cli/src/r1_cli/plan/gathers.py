"""What ranks that share a model have whole of it for a moment: the layers that compute and those that come next."""

import re
from collections import Counter
from math import prod

from r1_cli.config import RunConfig
from r1_cli.plan.memory import BYTES
from r1_cli.plan.trained import Shapes

LAYER = re.compile(r"^(.*?\.?(?:layers|blocks|h)\.\d+)\.")
TOWERS = ("visual.", "vision_tower.", "vision_model.")


def block_sizes(shapes: Shapes) -> tuple[int, int]:
    """Return how many weights the largest block has that is gathered by itself, and the rest beside all blocks.

    Blocks are the text model's layers, and a vision tower as one (`r1_core.learner.parallel.find_blocks`).
    """
    blocks, rest = Counter[str](), 0
    for name, shape in shapes.items():
        if any(tower in name for tower in TOWERS):
            blocks["tower"] += prod(shape)
        elif match := LAYER.match(name):
            blocks[match[1]] += prod(shape)
        else:
            rest += prod(shape)
    return max(blocks.values(), default=0), rest


def gathered_bytes(config: RunConfig, shapes: Shapes) -> tuple[int, int]:
    """Return what is whole on a rank going forward, and what of gradients beside it going backward; 0 where no rank is.

    Going forward these are the rest, which stays, a block and the next one, on its way already; with
    enable_full_shard=false all blocks stay. Going backward the
    gradients of one of them are whole, and once more in the precision in which they are added up.
    """
    fsdp = config.worker.actor.fsdp
    if config.shard_ranks == 1:
        return 0, 0
    block, rest = block_sizes(shapes)
    number = min(BYTES[config.worker.actor.kept_dtype], BYTES[fsdp.mp_param_dtype])
    whole = rest + 2 * block if fsdp.enable_full_shard else sum(map(prod, shapes.values()))
    return whole * number, max(block, rest) * (number + BYTES[fsdp.mp_reduce_dtype])
