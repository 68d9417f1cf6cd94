"""Distributed TensorFlow 1: parameter server, sessions, FIFOQueue, over gRPC on loopback.

Each process has a server of its own and a session on that, as in "Distributed TensorFlow"
(github.com/tensorflow/examples/blob/master/community/en/docs/deploy/distributed.md): a session on
another process's server, which that guide allows too, moves large arrays several times slower.
`device_filters` keep sessions from waiting for tasks that they do not use. Results that nobody
needs are not fetched.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "GRPC_VERBOSITY": "ERROR", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow.compat.v1 as tf
from peer import (
    PRODUCERS,
    READERS,
    ROOM,
    Round,
    Sight,
    Source,
    crew,
    free_ports,
    items,
    published,
    repeated,
    serve,
    taken,
)

tf.disable_eager_execution()


class Task:
    """One process of the cluster: its server, its session, and the graph, which grows by need."""

    def __init__(self, job: str, index: int, ports: list[int]) -> None:
        places = [f"127.0.0.1:{port}" for port in ports]
        spec = tf.train.ClusterSpec({"ps": places[:1], "chief": places[1:2], "worker": places[2:]})
        own = f"/job:{job}/task:{index}"
        config = tf.ConfigProto(device_filters=["/job:ps", own])
        self.server = tf.train.Server(spec, job_name=job, task_index=index, config=config)
        if job != "ps":
            self.session = tf.Session(self.server.target, config=config)

    @functools.cache  # noqa: B019
    def variable(self, nbytes: int) -> Any:
        """A variable on the ps, a placeholder, and operations: assign, add, read."""
        shape = [nbytes // 4]
        with tf.device("/job:ps/task:0"):
            variable = tf.get_variable(
                f"policy{nbytes}", shape, initializer=tf.zeros_initializer(), use_resource=True
            )
        value = tf.placeholder(tf.float32, shape)
        return (
            value,
            variable.assign(value, read_value=False),
            variable.assign_add(value, read_value=False),
            variable.read_value(),
        )

    @functools.cache  # noqa: B019
    def queue(self, nbytes: int, at_once: int, kind: str) -> Any:
        """A queue on the ps, a placeholder, and operations: enqueue, and dequeue of some."""
        shape = [at_once, nbytes // 4] if kind == "stacked" else [nbytes // 4]
        each = 1 if kind == "stacked" else at_once
        with tf.device("/job:ps/task:0"):
            queue = tf.queue.FIFOQueue(
                max(ROOM, 16 * each), [tf.float32], [shape], names=["observation"],
                shared_name=f"{kind}{nbytes}by{at_once}",
            )  # fmt: skip
        value = tf.placeholder(tf.float32, [each, *shape])
        some = tf.placeholder(tf.int32, [])
        return value, queue.enqueue_many({"observation": value}), some, queue.dequeue_up_to(some)


@contextmanager
def chief(workers: int) -> Iterator[tuple[Task, list[int]]]:
    """A ps in a process of its own, and the chief here."""
    ports = free_ports(2 + workers)
    command = [sys.executable, __file__, "ps", *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            yield Task("chief", 0, ports), ports
        finally:
            process.kill()


@contextmanager
def call() -> Iterator[Round]:
    """The value of a scalar on the ps."""
    with chief(0) as (task, _):
        value, assign, _, read = task.variable(4)
        task.session.run(assign, {value: [1.0]})
        run = task.session.make_callable(read)
        yield lambda cores, seconds: repeated(run, seconds)


def reader(index: int, ports: list[int]) -> Callable[..., None]:
    """Fetches the variable into new memory."""
    task, sight = Task("worker", index, ports), Sight()

    def read(nbytes: int, mode: str, number: float) -> None:
        sight.take(task.session.run(task.variable(nbytes)[3]), "fresh", number)

    return read


@contextmanager
def publish() -> Iterator[Round]:
    """`assign` of what is fed; `session.run` of the variable in the readers."""
    with chief(READERS) as (task, ports), crew(READERS, reader, ports) as readers:

        def into(array: Any, number: float) -> None:
            value, assign, *_ = task.variable(array.nbytes)
            task.session.run(assign, {value: array})

        yield published(into, readers, Source())


@contextmanager
def tcp() -> Iterator[Round]:
    """The same by one process."""
    source = Source()
    with chief(0) as (task, _):

        def made(nbytes: int) -> dict[str, float]:
            array = source.next(nbytes)
            value, assign, _, read = task.variable(nbytes)
            began = time.perf_counter()
            task.session.run(assign, {value: array})
            there = time.perf_counter()
            got = task.session.run(read)
            end = time.perf_counter()
            assert got[0] == source.number
            return {"publish": there - began, "read": end - there, "seconds": end - began}

        yield made


@contextmanager
def push() -> Iterator[Round]:
    """`assign_add` of what is fed."""
    source = Source()
    with chief(0) as (task, _):

        def made(nbytes: int, seconds: float) -> dict[str, float]:
            array = source.next(nbytes)
            value, assign, add, _ = task.variable(nbytes)
            task.session.run(assign, {value: array})
            return repeated(lambda: task.session.run(add, {value: array}), seconds)

        yield made


def producer(index: int, ports: list[int]) -> Callable[..., None]:
    """Enqueues items, stacked by itself."""
    task = Task("worker", index, ports)

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        several = items(nbytes, at_once, kind)
        value, enqueue, *_ = task.queue(nbytes, at_once, kind)
        for _ in range(turns):
            task.session.run(enqueue, {value: np.stack([each["observation"] for each in several])})

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """A FIFOQueue on the ps; `enqueue_many`, `dequeue_up_to` as many as paceline takes."""
    with chief(PRODUCERS) as (task, ports), crew(PRODUCERS, producer, ports) as producers:

        def take(nbytes: int, at_once: int, kind: str, rest: int) -> int:
            each = 1 if kind == "stacked" else at_once
            _, _, some, dequeue = task.queue(nbytes, at_once, kind)
            # Only a queue that is closed gives fewer than it was asked for.
            count = min(max(each, 8), rest)
            return len(task.session.run(dequeue, {some: count})["observation"])

        yield taken(producers, take)


def worker(index: int, ports: list[int]) -> Callable[[], None]:
    """Has done something on the ps."""
    task = Task("worker", index, ports)
    task.session.run(tf.add(1.0, 1.0))
    return lambda: None


@contextmanager
def start() -> Iterator[Round]:
    """A ps, a chief and four workers, until each has run something."""

    def made() -> dict[str, float]:
        began = time.perf_counter()
        with chief(4) as (_, ports), crew(4, worker, ports):
            return {"seconds": time.perf_counter() - began}

    yield made


@contextmanager
def memory() -> Iterator[Round]:
    """The same, kept."""
    with chief(4) as (_, ports), crew(4, worker, ports):
        yield dict


if __name__ == "__main__":
    if sys.argv[1] == "ps":
        Task("ps", 0, [int(port) for port in sys.argv[2:]])
        sys.stdin.read()
        os._exit(0)
    serve(call=call, publish=publish, push=push, queue=queue, tcp=tcp, start=start, memory=memory)
