"""Calls functions in a worker, once for each input, and answers with what they return."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from paceline import functions
from paceline.adapters.base import convert
from paceline.calling import keywords, told
from paceline.core import tree as trees
from paceline.core.errors import SchemaError, WouldBlock
from paceline.core.tree import Array, Tree
from paceline.worker.handle import Worker
from paceline.worker.line import KEPT, Answer, Ask, Began, Load


class Caller:
    """The functions that a worker was given, loaded when they are first called."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._payloads: dict[bytes, bytes] = {}
        self._loaded: dict[bytes, tuple[Any, tuple[Any, ...]]] = {}

    def load(self, message: Load) -> None:
        """Keep a function."""
        self._payloads[message.key] = message.payload
        while len(self._payloads) > KEPT:
            oldest = next(iter(self._payloads))
            del self._payloads[oldest]
            self._loaded.pop(oldest, None)

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
            return Answer(ask.number, error=(kind, told(e)))

    def _function(self, key: bytes) -> tuple[Any, tuple[Any, ...]]:
        if key not in self._loaded:
            loaded: Any = self._resolved(self._payloads[key])
            self._loaded[key] = loaded
        return self._loaded[key]

    def _resolved(self, payload: bytes) -> Any:
        return functions.load(payload, functools.cache(self._worker.session.handle))


def _packed(number: int, result: Tree) -> Answer:
    try:
        flat = trees.flatten(result, convert)
    except SchemaError as e:
        return Answer(number, error=("SchemaError", str(e)))
    content: Array = np.empty(flat.nbytes, np.uint8)
    flat.write(memoryview(content.data))
    return Answer(number, flat.layout, flat.values, content if flat.nbytes else None)
