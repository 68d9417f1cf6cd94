"""Accumulators: gradients of many workers, taken as one mean."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from paceline.adapters.base import rebuild
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import versions
from paceline.core.clock import checked_timeout
from paceline.core.errors import PacelineError, SchemaError
from paceline.core.numbers import whole
from paceline.handles import Handle, lasting
from paceline.packing import copied, memory, pack
from paceline.pending import limited
from paceline.requests import Request

OnLeave = Literal["raise", "lower", "wait"]

CAPACITY = 64
"""How many gradients an accumulator holds that were not taken yet, unless told another number."""


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of gradients that were taken together.

    Attributes:
        tree: its arrays own their memory.
        n: how many gradients it is of.
        workers: the tasks they came from, in the order in which they came.
        lags: of each, how many versions the variable had gone on since.
        version: the variable's when they were taken; `None` without a variable.
    """

    tree: Any
    n: int
    workers: tuple[str, ...]
    lags: tuple[int, ...]
    version: int | None

    def __repr__(self) -> str:
        at = "" if self.version is None else f" at version {versions.count_of(self.version)}"
        return f"<Mean of {self.n}{at}>"


class Accumulator(Handle):
    """Gradients of one structure, held until somebody takes the mean of the first `n` of them.

    A contributor is a session that joined or applied, until it leaves, closes or dies. What was
    accepted of it counts nevertheless. As a context manager an accumulator is joined for the block.
    """

    kind = "accumulator"

    def __init__(
        self,
        connection: Connection,
        key: str,
        variable: str | None,
        max_lag: int | None,
        capacity: int,
        definition: m.DefineAccumulator,
    ) -> None:
        super().__init__(connection, key)
        self._definition = definition
        self._joined = False
        self.variable = variable
        self.max_lag = max_lag
        self.capacity = capacity

    def __repr__(self) -> str:
        of = "" if self.variable is None else f" for '{self.variable}'"
        return f"<Accumulator {self.called}{of} on {self._connection.address}>"

    def __enter__(self) -> Accumulator:
        self.join()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    @lasting
    def join(self) -> None:
        """Let those who take count on this session, before its first gradient."""
        self._joined = True
        self._connection.call(m.Contribute(self.key, "join"))

    @lasting
    def leave(self) -> None:
        """Let nobody who takes count on this session any longer; its next `apply` joins again."""
        self._joined = False
        self._connection.call(m.Contribute(self.key, "leave"))

    @lasting
    @limited
    def apply(
        self, gradient: Any, version: int | None = None, *, timeout: float | None = 60.0
    ) -> bool:
        """Hand a gradient in; whether it was accepted. It is copied.

        `version` is that of the variable that it was made with. It is dropped, and counted, when
        the variable has more than `max_lag` versions since; or will have with the assign that is
        due, because a mean was taken at the current version. An accepted one is dropped, and
        counted, when it has become so old before `n` were there, or when `n` others were first.

        Raises:
            SchemaError: its structure is not the accumulator's, or the version is missing, in the
                future, or given though there is no variable.
            TimedOut: the accumulator held its `capacity` of gradients for `timeout` seconds.
        """
        limit = checked_timeout(timeout)
        self._joined = True
        head, block = pack(self._connection.arena, gradient, f"apply {self.called}")
        made_with = None if version is None else operator.index(version)
        request = m.Apply(self.key, head, made_with, limit)
        return bool(self._connection.call(request, [block], limit).content)

    def applying(self, gradient: Any, version: int | None = None) -> Request[bool]:
        """As `apply`, for `session.run` together with others."""
        head, block = pack(self._connection.arena, gradient, f"apply {self.called}")
        made_with = None if version is None else operator.index(version)
        message = m.Apply(self.key, head, made_with, 0.0)
        return Request(self._connection, message, [block], lambda reply, _: bool(reply.content))

    @lasting
    @limited
    def take(
        self, n: int, *, on_leave: OnLeave = "raise", like: Any = None, timeout: float | None = 60.0
    ) -> Mean:
        """Wait for `n` gradients, and take the mean of the first `n` in one step.

        Sums are made in the dtype of each leaf, in the order in which gradients came; NaN is a
        value. What came after them and would be too old for the next version is dropped as `late`,
        and so is what comes until the variable is assigned: with `max_lag=0`, everything.

        When contributors have left and those who are there cannot make `n`, each by one more, it
        raises; with `on_leave="lower"` it takes as many as there can be, and with `"wait"` it waits
        for others to come. A contributor of the same task that comes instead is counted on again.
        With `like`, named tuples, dataclasses and JAX arrays come back as such.

        Raises:
            WorkerLeft: too few are left, the message says who left; with `"lower"`, nobody is.
                Never with `"wait"`.
            TimedOut: they were not there within `timeout` seconds; nothing was taken.
            SchemaError: `n` is more than its `capacity`, or the mean differs from `like`.
        """
        limit = checked_timeout(timeout)
        n = whole(n, f"take {self.called}: n")
        if on_leave not in get_args(OnLeave):
            raise SchemaError(
                f"take {self.called}: on_leave is 'raise', 'lower' or 'wait', not {on_leave!r}"
            )
        request = m.Take(self.key, n, on_leave, limit)
        found, buffers = self._connection.exchange(request, timeout=limit)
        tree = copied(found.layout, found.values, memory(buffers))
        del buffers
        self._connection.give_back()
        if like is not None:
            tree = rebuild(tree, like, f"take {self.called}")
        version = None if found.version == m.NO_VERSION else found.version
        return Mean(tree, len(found.producers), tuple(found.producers), tuple(found.lags), version)

    @lasting
    def stats(self) -> dict[str, Any]:
        """Its counters: applied = taken + dropped (by reason) + held, always; and who contributes.

        Reasons are `stale` (the variable had gone on), `late` (the step it was for had been taken)
        and `epoch`. `left` has the tasks that contributed, left and did not come back.
        """
        content: dict[str, Any] = self._connection.call(m.AccumulatorStats(self.key)).content
        return content

    def _made_at(self, line: Connection, timeout: float | None) -> None:
        definition = msgspec.structs.replace(self._definition, timeout=timeout)
        line.call(definition, timeout=timeout)
        if self._joined:
            line.call(m.Contribute(self.key, "join"))

    def _follow(self, before: Connection, line: Connection) -> None:
        # It may be that its variable is not there any more, which is for whoever uses it.
        with suppress(PacelineError):
            super()._follow(before, line)
