"""Run a Ray cluster of two nodes on this machine until standard input ends; print its address and raylets.

python tests/two_nodes.py CPUS_OF_A_NODE
"""

import json
import sys

from ray.cluster_utils import Cluster

if __name__ == "__main__":
    size = {"num_cpus": int(sys.argv[1]), "object_store_memory": 100 * 2**20, "node_ip_address": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    other = cluster.add_node(**size)
    raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, other)]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
    sys.stdin.read()
    cluster.shutdown()
