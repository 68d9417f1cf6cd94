"""What a type checker knows of the public names; `test_typing.py` runs one over this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

from paceline import Batch, Cluster, Collection, Queue, Session, Snapshot, Variable, Worker

Floats = NDArray[np.float64]
Params = dict[str, Floats]
Step = dict[str, Floats]


class Net:
    pass


def variables(session: Session, net: Net, params: Params) -> None:
    policy = session.variable("policy", params)
    assert_type(policy, Variable[Params])
    assert_type(policy.read(), Snapshot[Params])
    assert_type(policy.read().tree, Params)
    assert_type(policy.read().version, int)
    assert_type(policy.read().count, int)
    assert_type(policy.read(tag="best"), Snapshot[Params])
    assert_type(policy.tag("best"), int)
    assert_type(policy.tags(), dict[str, int])
    assert_type(policy.read_into(params, tag="best"), int)
    assert_type(session.variable("policy", params, memory=1 << 20), Variable[Params])
    assert_type(policy.assign(params), int)
    assert_type(policy.read_into(params), int)
    assert_type(policy.version, int)
    policy.assign(3)  # type: ignore[arg-type]
    assert_type(session.variable("net", net), Variable[Net])
    assert_type(session.variable("other"), Variable[Any])
    known: Variable[Params] = session.variable("policy", timeout=5)
    assert_type(known.read().tree["w"], Floats)


def queues(session: Session, step: Step) -> None:
    queue: Queue[Step] = session.queue("steps", 10)
    queue.enqueue(step)
    queue.enqueue(3)  # type: ignore[arg-type]
    assert_type(queue.dequeue(), Step)
    assert_type(queue.dequeue_many(3), Batch[Step])
    assert_type(queue.dequeue_many(3).data, Step)


def rollouts(policy: Variable[Params], worker: Worker) -> Iterator[Step]:
    while not worker.should_stop():
        worker.log(score=1.0)
        yield policy.read().tree


def collections(cluster: Cluster, params: Params) -> None:
    assert_type(cluster.variable("policy", params), Variable[Params])
    batches: Collection[Step] = cluster.collect(rollouts, "policy", batch_size=2)
    assert_type(batches.next(), Batch[Step])
    for batch in batches:
        assert_type(batch, Batch[Step])
        assert_type(batch.data["x"], Floats)
        assert_type(batch.version, NDArray[np.int64])
        assert_type(batch.lag, NDArray[np.int64])
        assert_type(batch.count, NDArray[np.int64])
        assert_type(batch.worker, tuple[str, ...])
        assert_type(batch.metrics, dict[str, Floats])
        assert_type(batch.to("torch"), Batch[Any])
    with Cluster(2) as made:
        assert_type(made, Cluster)
    with cluster.collect(rollouts, batch_size=1) as opened:
        assert_type(opened.closed, bool)
