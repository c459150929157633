"""A Ray cluster of two nodes on this machine, in a process of its own, and of further ones that join later.

python tests/two_nodes.py CPUS_OF_A_NODE
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from patience import LONG

# Two nodes of one machine have its loopback address, which Ray would not take for one of many, and no token. Actors
# would give way to all other work.
HERE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
NODES = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1"]


@contextmanager
def two_nodes(cpus: int = 1) -> Iterator[tuple[str, list[int], Callable[[], None]]]:
    """A cluster's address, the processes that its two nodes stand and fall with, and what lets a further one join."""
    command = [sys.executable, __file__, str(cpus)]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env={**os.environ, **HERE}, **streams) as process:
        started = json.loads(process.stdout.readline())

        def join() -> None:
            process.stdin.write("\n")
            process.stdin.flush()

        yield started["address"], started["raylets"], join
        process.communicate("", timeout=LONG)


def run(cpus: int) -> None:
    """Start the nodes, print their address and raylets, and stop them when standard input ends."""
    from ray.cluster_utils import Cluster

    size = {"num_cpus": cpus, "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    other = cluster.add_node(**size)
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, other)]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    for _ in sys.stdin:  # a line for each further node
        cluster.add_node(**size)
    cluster.shutdown()


if __name__ == "__main__":
    run(int(sys.argv[1]))
