"""Calls functions in a worker, once for each input, and answers with what they return."""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import suppress
from typing import Any

import numpy as np

from paceline import functions
from paceline.adapters.base import convert
from paceline.calling import keywords, told
from paceline.core import tree as trees
from paceline.core.errors import SchemaError, WouldBlock
from paceline.core.tree import Array, Tree
from paceline.variables import Variable
from paceline.worker.handle import Worker
from paceline.worker.line import FILES, KEPT, Answer, Ask, Began, Held, Load


class Caller:
    """The functions that a worker was given, loaded when they are first called.

    What a function had read that failed is told up to `keeps` bytes. `remedy` is what to do where a
    module is missing, as the end of a sentence.
    """

    def __init__(self, worker: Worker, keeps: int, remedy: str) -> None:
        self._worker = worker
        self._keeps, self._remedy = keeps, remedy
        self._failed: Counter[bytes] = Counter()
        self._payloads: dict[bytes, bytes] = {}
        self._loaded: dict[bytes, tuple[Any, tuple[Any, ...]]] = {}

    def load(self, message: Load) -> None:
        """Keep a function."""
        self._payloads[message.key] = message.payload
        while len(self._payloads) > KEPT:
            oldest = next(iter(self._payloads))
            del self._payloads[oldest]
            self._loaded.pop(oldest, None)
            del self._failed[oldest]

    def answer(self, ask: Ask) -> Answer:
        """Call the function. What it raises is part of the answer.

        Raises:
            SystemExit, KeyboardInterrupt: the function's own; they end whoever calls.
            BaseException: the function's own, where the server is gone, and this worker of no use.
        """
        worker = self._worker
        worker.begin(ask.number)
        try:
            fn, resources = self._function(ask.key)
            given = () if ask.input is None else (self._resolved(ask.input),)
            if ask.timed:
                worker.tell(Began(ask.number))
            return _packed(ask.number, fn(*given, *resources, **keywords(fn, worker)))
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as e:
            if not worker.session.lines.alive():
                raise
            kind = "WouldBlock" if isinstance(e, WouldBlock) else "TaskFailed"
            return Answer(ask.number, error=(kind, told(e)), held=self._held(ask.key))

    def _held(self, key: bytes) -> tuple[Held, ...]:
        """What a function that raised had read last, for those failures of which there is a file.

        Nobody can tell here whether there is one of this; of what fails often there is none.
        """
        self._failed[key] += 1
        if key not in self._loaded or self._failed[key] > FILES:
            return ()
        return last_read(self._loaded[key][1], self._keeps)

    def _function(self, key: bytes) -> tuple[Any, tuple[Any, ...]]:
        if key not in self._loaded:
            loaded: Any = self._resolved(self._payloads[key])
            self._loaded[key] = loaded
        return self._loaded[key]

    def _resolved(self, payload: bytes) -> Any:
        return functions.load(payload, functools.cache(self._worker.session.handle), self._remedy)


def _packed(number: int, result: Tree) -> Answer:
    try:
        flat = trees.flatten(result, convert)
    except SchemaError as e:
        return Answer(number, error=("SchemaError", str(e)))
    content: Array = np.empty(flat.nbytes, np.uint8)
    flat.write(memoryview(content.data))
    return Answer(number, flat.layout, flat.values, content if flat.nbytes else None)


def last_read(resources: tuple[Any, ...], most: int) -> tuple[Held, ...]:
    """What a function that failed had read last, as far as it is still there."""
    found: list[Held] = []
    for each in resources:
        snapshot = each.last_read() if isinstance(each, Variable) else None
        if snapshot is None:
            continue
        with suppress(SchemaError):  # a model that the function has made into something else
            flat = trees.flatten(snapshot.tree, convert)
            most -= flat.nbytes
            if most >= 0:
                content: Array = np.empty(flat.nbytes, np.uint8)
                flat.write(memoryview(content.data))
                found.append(Held(each.key, snapshot.version, flat.layout, flat.values, content))
    return tuple(found)
