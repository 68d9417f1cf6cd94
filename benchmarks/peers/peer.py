"""What the programs of all peers share: how they are asked, processes that help, what is timed.

A program is started with a work and asked for rounds of it. `serve(call=call, ...)` names the works
that a peer has: context managers that prepare and give the function that makes a round. Standard
library and NumPy only: it runs in the environment of every peer.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

READERS = 8
PRODUCERS = 4
ROOM = 64
"""Entries that a queue may hold, wherever that can be said."""

Round = Callable[..., dict[str, float]]
Work = Callable[[], AbstractContextManager[Round]]


def serve(**works: Work) -> None:
    """Make rounds of the work that the command line names, for as long as they are asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Whatever a library prints must not come between the answers.

    def say(what: dict[str, Any]) -> None:
        print(json.dumps(what), file=answers, flush=True)

    with works[sys.argv[1]]() as made:
        say({"ready": True})
        for line in sys.stdin:
            say(made(**json.loads(line)))


class Crew:
    """Processes beside the program; each does a thing when told, and says how long it took.

    `opened(index, *arguments)` is called in each and gives the function that is called each time.
    """

    def __init__(self, count: int, opened: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._lines, self._processes = [], []
        for index in range(count):
            mine, other = context.Pipe()
            process = context.Process(
                target=_obey, args=(other, opened, index, *arguments), daemon=True
            )
            process.start()
            other.close()
            self._lines.append(mine)
            self._processes.append(process)

    def ready(self) -> None:
        """Wait until all are prepared."""
        for line in self._lines:
            assert line.recv() == "ready"

    def tell(self, count: int, **what: Any) -> None:
        """Let the first `count` of them begin."""
        for line in self._lines[:count]:
            line.send(what)

    def hear(self, count: int) -> list[float]:
        """The seconds that each has taken, when all are done."""
        return [line.recv() for line in self._lines[:count]]

    def close(self) -> None:
        """End them."""
        for line in self._lines:
            line.close()
        for process in self._processes:
            process.join(2)
            process.kill()


def _obey(line: Any, opened: Callable[..., Any], index: int, *arguments: Any) -> None:
    act = opened(index, *arguments)
    line.send("ready")
    try:
        while True:
            what = line.recv()
            began = time.perf_counter()
            act(**what)
            line.send(time.perf_counter() - began)
    except EOFError:
        # The libraries' own ways to end may wait for those that are gone already.
        os._exit(0)


@contextmanager
def crew(count: int, opened: Callable[..., Any], *arguments: Any) -> Iterator[Crew]:
    """A crew that is ready, and ends with the block."""
    made = Crew(count, opened, *arguments)
    try:
        made.ready()
        yield made
    finally:
        made.close()


def repeated(run: Callable[[], object], seconds: float) -> dict[str, float]:
    """Seconds of one `run`, the mean over about as long as given."""
    run()
    began, times = time.perf_counter(), 0
    while (spent := time.perf_counter() - began) < seconds:
        run()
        times += 1
    return {"seconds": spent / times}


class Source:
    """The arrays that are published: of each size one, which differs each time."""

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.number = 0.0

    def next(self, nbytes: int) -> np.ndarray[Any, Any]:
        """The array of that size, as float32, with a new number in front."""
        if nbytes not in self._arrays:
            self._arrays = {nbytes: np.ones(nbytes // 4, np.float32)}
        self.number += 1
        self._arrays[nbytes][0] = self.number
        return self._arrays[nbytes]


class Sight:
    """What a reader does with an array: look at each page of it, or copy it into its own memory."""

    def __init__(self) -> None:
        self.own = np.zeros(0, np.float32)

    def take(self, array: np.ndarray[Any, Any], mode: str, number: float) -> None:
        """See it: as a `view`, or copied into `own` memory; what is `fresh` is own already."""
        if mode == "own":
            np.copyto(self.room(array.nbytes), array)
            array = self.own
        elif mode == "view":
            self.own = np.zeros(0, np.float32)
            array[::1024].sum()
        assert array[0] == number, (array[0], number)

    def room(self, nbytes: int) -> np.ndarray[Any, Any]:
        """Own memory of that size, which has been used before."""
        if self.own.nbytes != nbytes:
            self.own = np.ones(nbytes // 4, np.float32)
        return self.own


def published(
    publish: Callable[[np.ndarray[Any, Any], float], object], readers: Any, source: Source
) -> Round:
    """A round: one version from its publication until the last reader has it."""

    def made(nbytes: int, readers_: int, mode: str) -> dict[str, float]:
        array = source.next(nbytes)
        began = time.perf_counter()
        publish(array, source.number)
        there = time.perf_counter()
        readers.tell(readers_, nbytes=nbytes, mode=mode, number=source.number)
        longest = max(readers.hear(readers_))
        return {
            "publish": there - began,
            "read": longest,
            "seconds": time.perf_counter() - began,
        }

    return lambda nbytes, readers, mode: made(nbytes, readers, mode)


def item(nbytes: int) -> dict[str, Any]:
    """One item: a tree of one array."""
    return {"observation": np.ones(nbytes // 4, np.float32)}


def items(nbytes: int, at_once: int, kind: str) -> list[dict[str, Any]]:
    """Items as they go into a queue together; `stacked`: one tree with a row for each."""
    if kind == "stacked":
        return [{"observation": np.ones((at_once, nbytes // 4), np.float32)}]
    return [item(nbytes) for _ in range(at_once)]


def taken(producers: Any, take: Callable[[int, int, str, int], int]) -> Round:
    """A round: so many items from some producers; the clock starts when the first ones are there.

    `take(nbytes, at_once, kind, rest)` takes some of the `rest` entries that are still to come, and
    says how many. An entry is one item, or `at_once` that are stacked.
    """
    rates: dict[tuple[int, int, int, str], float] = {}

    def made(nbytes: int, producers_: int, at_once: int, kind: str, seconds: float) -> float:
        key = (nbytes, producers_, at_once, kind)
        each = 1 if kind == "stacked" else at_once
        turns = max(2, int(rates.get(key, 0.0) * seconds / at_once / producers_))
        producers.tell(producers_, nbytes=nbytes, at_once=at_once, kind=kind, turns=turns)
        rest = turns * each * producers_
        rest -= take(nbytes, at_once, kind, each)
        began = time.perf_counter()
        counted = rest
        while rest > 0:
            rest -= take(nbytes, at_once, kind, rest)
        took = time.perf_counter() - began
        producers.hear(producers_)
        rates[key] = counted * (at_once // each) / took
        return rates[key]

    def round_(nbytes: int, producers: int, at_once: int, kind: str, seconds: float) -> Any:
        if (nbytes, producers, at_once, kind) not in rates:
            for part in (0.02, 0.1):
                made(nbytes, producers, at_once, kind, seconds * part)
        return {"rate": made(nbytes, producers, at_once, kind, seconds)}

    return round_


def free_ports(count: int) -> list[int]:
    """Ports on loopback that nobody has at this moment."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
