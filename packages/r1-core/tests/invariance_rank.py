"""One of two gloo ranks: writes the metrics of every objective under every cut, and its shard of the gradients.

Arguments: rank and a folder.
"""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
import two_ranks
from core_cases import CUTS_FOR_RANKS, OBJECTIVES, outcome, policy_learner
from safetensors.torch import save_file


def main(rank, folder):
    parallel = two_ranks.join(rank, folder)
    learner = policy_learner(pytest.MonkeyPatch(), parallel)
    for cut, batching in CUTS_FOR_RANKS.items():
        outcomes = {name: outcome(learner, objective, batching) for name, objective in OBJECTIVES.items()}
        shards = {
            f"{name}/{key}": grad.to_local() for name, (_, grads) in outcomes.items() for key, grad in grads.items()
        }
        save_file(shards, Path(folder) / f"{cut} {rank}.safetensors")
        metrics = {name: metrics for name, (metrics, _) in outcomes.items()}
        (Path(folder) / f"{cut} {rank}.json").write_text(json.dumps(metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
