"""paceline: a server in a process of its own, sessions in all others."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peer import (
    PRODUCERS,
    READERS,
    ROOM,
    Round,
    Sight,
    Source,
    crew,
    item,
    items,
    published,
    repeated,
    serve,
    taken,
)
from served import SECRET, served
from tcp import served as served_over_tcp

import paceline


@contextmanager
def call() -> Iterator[Round]:
    """The value of a scalar at the server, and a function there that does nothing."""
    cores = sorted(os.sched_getaffinity(0))
    core = {"free": -1, "one": cores[0], "two": cores[-1]}
    with (
        served(-1, "free") as free,
        served(cores[0], "one") as one,
        served(cores[-1], "two") as two,
    ):
        sessions = {"free": free, "one": one, "two": two}
        counters = {where: session.counter("scalar") for where, session in sessions.items()}

        def made(cores_: str, seconds: float) -> dict[str, float]:
            os.sched_setaffinity(0, set(cores) if core[cores_] < 0 else {cores[0]})
            session, counter = sessions[cores_], counters[cores_]
            function = repeated(lambda: session.run("empty"), seconds / 3)["seconds"]
            return {**repeated(lambda: counter.value, seconds), "function": function}

        yield lambda cores, seconds: made(cores, seconds)


def reader(index: int, target: str) -> Callable[..., None]:
    """Reads the newest version, which it has not seen."""
    session = paceline.Session(target, secret=SECRET)
    sight, variable = Sight(), functools.cache(session.variable)

    def read(nbytes: int, mode: str, number: float) -> None:
        policy = variable(f"policy of {nbytes}")
        if mode == "own":
            policy.read_into(sight.room(nbytes))
            assert sight.own[0] == number
        else:
            sight.take(policy.read().tree, mode, number)

    return read


@contextmanager
def publish() -> Iterator[Round]:
    """`assign` here, `read_into` or `read` in the readers."""
    with served() as session, crew(READERS, reader, session.connection.address) as readers:
        made: dict[int, paceline.Variable[Any]] = {}

        def assign(array: Any, number: float) -> None:
            if array.nbytes not in made:
                made[array.nbytes] = session.variable(f"policy of {array.nbytes}", array)
            made[array.nbytes].assign(array)

        yield published(assign, readers, Source())


@contextmanager
def push() -> Iterator[Round]:
    """`assign_add`."""
    source = Source()
    with served() as session:

        def made(nbytes: int, seconds: float) -> dict[str, float]:
            array = source.next(nbytes)
            policy = session.variable(f"policy of {nbytes}", array)
            return repeated(lambda: policy.assign_add(array), seconds)

        yield made


def producer(index: int, target: str) -> Callable[..., None]:
    """Enqueues so many items, in turns."""
    made = functools.cache(paceline.Session(target, secret=SECRET).queue)

    def produce(nbytes: int, at_once: int, kind: str, turns: int) -> None:
        queue = made(f"{kind} of {nbytes} by {at_once}")
        several = items(nbytes, at_once, kind)
        for _ in range(turns):
            queue.enqueue_many(several, timeout=60)

    return produce


@contextmanager
def queue() -> Iterator[Round]:
    """`enqueue_many`, or `enqueue` of one; `dequeue_many` gives a stacked batch in own memory."""
    with served() as session, crew(PRODUCERS, producer, session.connection.address) as producers:
        made = functools.cache(session.queue)

        def take(nbytes: int, at_once: int, kind: str, rest: int) -> int:
            each = 1 if kind == "stacked" else at_once
            room = max(ROOM, 16 * each)
            queue = made(f"{kind} of {nbytes} by {at_once}", room)
            return len(queue.dequeue_up_to(min(max(each, 8), rest), timeout=60))

        yield taken(producers, take)


def making(nbytes: int) -> Iterator[Any]:
    """Items one by one, each a tree of its own."""
    made = item(nbytes)
    while True:
        yield made


@contextmanager
def collect() -> Iterator[Round]:
    """The same as `queue`, through `collect`: workers yield one item at a time."""
    with paceline.Cluster(workers=2, progress="quiet") as cluster:

        def made(nbytes: int, producers: int, at_once: int, kind: str, seconds: float) -> Any:
            size = 16 if nbytes > 4096 else 256
            with cluster.collect(making, nbytes, batch_size=size, max_lag=None) as batches:
                for _ in range(4):
                    batches.next(timeout=60)
                taken = repeated(lambda: batches.next(timeout=60), seconds)
            return {"rate": size / taken["seconds"]}

        yield made


@contextmanager
def tcp() -> Iterator[Round]:
    """`assign` and `read_into`, by a session that is connected over TCP on loopback."""
    source, target = Source(), Sight()
    with served_over_tcp() as session:

        def made(nbytes: int) -> dict[str, float]:
            array, place = source.next(nbytes), target.room(nbytes)
            policy = session.variable(f"policy of {nbytes}", array)
            began = time.perf_counter()
            policy.assign(array)
            there = time.perf_counter()
            # A new handle has read nothing yet, so it has to ask.
            copy.copy(policy).read_into(place)
            end = time.perf_counter()
            assert place[0] == source.number
            return {"publish": there - began, "read": end - there, "seconds": end - began}

        yield made


def trivial() -> Iterator[int]:
    """Nothing to do."""
    while True:
        yield 0


@contextmanager
def start() -> Iterator[Round]:
    """`Cluster(4)`, until there is an item of each worker."""

    def made() -> dict[str, float]:
        began = time.perf_counter()
        with paceline.Cluster(workers=4, progress="quiet") as cluster:
            collection = cluster.collect(trivial, batch_size=1, max_lag=None)
            first = 0.0
            seen: set[Any] = set()
            while len(seen) < 4:
                seen |= set(collection.next(timeout=60).worker)
                first = first or time.perf_counter() - began
            return {"seconds": time.perf_counter() - began, "first": first}

    yield made


@contextmanager
def memory() -> Iterator[Round]:
    """Four workers that have made an item each."""
    with paceline.Cluster(workers=4, progress="quiet") as cluster:
        cluster.run(lambda: None)
        yield dict


if __name__ == "__main__":
    serve(
        call=call,
        publish=publish,
        push=push,
        queue=queue,
        collect=collect,
        tcp=tcp,
        start=start,
        memory=memory,
    )
