"""A program on a Ray cluster of several nodes, one of which dies while workers make items there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from ray.cluster_utils import Cluster as Nodes

import paceline


def play(policy: Any, worker: Any) -> Iterator[Any]:
    """Items that say where they were made."""
    node = ray.get_runtime_context().get_node_id()
    while True:
        policy.read()
        yield {"by": worker.index, "node": node}


def main() -> None:
    """Train until the workers of the node that died make items elsewhere."""
    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    dying = nodes.add_node(num_cpus=2)
    nodes.add_node(num_cpus=3, resources={"serves": 1})
    where: dict[int, str] = {}
    moved: list[int] = []
    engine = paceline.Ray(
        address=nodes.address,
        ps={"resources": {"serves": 1}},  # a server's death ends the cluster
        worker={"num_cpus": 1},
        strategy="SPREAD",
    )
    with paceline.Cluster(3, engine=engine, progress="quiet") as cluster:
        policy = cluster.variable("policy", np.zeros(2))
        collection = cluster.collect(play, policy, batch_size=4)
        for batch in collection:
            policy.assign_add(np.ones(2))
            for by, node in zip(batch.data["by"].tolist(), batch.data["node"], strict=True):
                where[by] = str(node)
            if not moved and len(where) == 3:
                moved = [by for by, node in where.items() if node == dying.node_id]
                nodes.remove_node(dying)
            elif moved and dying.node_id not in where.values():
                break
        stats = collection.stats()
    nodes.shutdown()
    sys.stdout.write(json.dumps({"moved": moved, "stats": stats}) + "\n")


if __name__ == "__main__":
    main()
