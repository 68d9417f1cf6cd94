"""Variables spread over several servers: one version for all, whose home alone numbers and commits.

A write begins at the home, is staged on the others, and is committed at the home. A read asks the
home, which keeps that version until the reader has fetched the parts that the others have of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import spreading
from paceline.core.clock import left
from paceline.core.errors import Disconnected, PacelineError, SchemaError, TimedOut, said_of
from paceline.core.names import quoted
from paceline.core.row_pieces import cuts, joined
from paceline.core.rows import Table, checked_indices, table
from paceline.core.tree import Array, Flat, check
from paceline.core.versions import count_of
from paceline.lines import Lines
from paceline.packing import pack, taken
from paceline.pending import Pending, limited
from paceline.shares import Share, fetched, gathered, row_shares
from paceline.stores import Hint, Near, hinted
from paceline.transports.base import Buffers

R = TypeVar("R")


class Spread:
    """Where the tree of a spread variable is stored.

    When a server was started again, this joins it anew. What it had is lost: then reads and
    additions wait for the next assign, and where it was the home, all wait until somebody gives the
    variable a first value again.
    """

    bounded = False

    def __init__(
        self,
        lines: Lines,
        key: str,
        home: Connection,
        plan: m.Spreading,
        seen: Hint | None,
        near: Near | None = None,
    ) -> None:
        self._lines = lines
        self._near = near
        self._name = key
        self._task = plan.parts[0][0]
        # They change together, when the home was started again.
        self._known = home, plan, seen

    @property
    def home(self) -> Connection:
        return self._known[0]

    def step(self, what: str) -> Connection:
        raise SchemaError(
            f"{what}: it is spread over {', '.join(self._tasks)}, and what is on several servers"
            " cannot be in a list of requests: use assign, assign_add or read"
        )

    def hint(self) -> int | None:
        seen = self._known[2]
        return None if seen is None else seen.version()

    @limited
    def write(self, tree: Any, what: str, *, adding: bool, timeout: float | None) -> int:
        flat = taken(tree, what)

        def cut(plan: m.Spreading) -> list[Share]:
            shares = spreading.shares(plan, flat, what)
            if adding:
                spreading.check_added(plan.layout, what)
            return [Share(share) for share in shares]

        return self._written(cut, "add" if adding else "assign", what, timeout)

    @limited
    def scatter_add(
        self, indices: Any, rows: Any, leaf: str | None, what: str, timeout: float | None
    ) -> int:
        places, flat = checked_indices(indices, what), taken(rows, what)

        def cut(plan: m.Spreading) -> list[Share]:
            wanted = _chosen(plan, leaf, places, what)
            wanted.check_rows(flat.layout, places.shape, what)
            return row_shares(plan, wanted, places.reshape(-1), flat)

        if not places.size:
            home, plan = self._home(what, timeout)
            cut(plan)
            return home.call(m.Await(self._name, 0.0)).version
        return self._written(cut, "rows", what, timeout)

    @limited
    def gather(
        self, indices: Any, leaf: str | None, what: str, timeout: float | None
    ) -> tuple[int, Any]:
        places, began = checked_indices(indices, what), time.monotonic()

        def attempt() -> tuple[int, Any] | None:
            home, plan = self._home(what, left(timeout, began))
            used = self._lines.now([task for task, _ in plan.parts])
            wanted = _chosen(plan, leaf, places, what)
            parts = cuts(plan, wanted, places.reshape(-1))
            version, found, lost = gathered(home, used, self._name, plan, parts)
            if lost:
                self._wait_for_assign(home, version, what, lost, began, timeout)
                return None
            tree = joined(wanted, places.shape, parts, found)
            del found
            self.give_back()
            return version, tree

        return self._tried(attempt, what, timeout, began)

    def _written(
        self,
        cut: Callable[[m.Spreading], list[Share]],
        kind: Literal["assign", "add", "rows"],
        what: str,
        timeout: float | None,
    ) -> int:
        began, adding = time.monotonic(), kind != "assign"

        def attempt() -> tuple[Connection, m.Staging, Share] | None:
            home, plan = self._home(what, left(timeout, began))
            used = _reached(self._lines, plan, what, left(timeout, began))
            shares = cut(plan)
            turn = _begun(home, self._name, kind, left(timeout, began))
            lost = _staged(used, self._name, plan, turn, shares, what, adding=adding)
            if lost:
                _abandon(home, self._name, turn)
                self._wait_for_assign(home, turn.version, what, lost, began, timeout)
                return None
            return home, turn, shares[0]

        home, turn, share = self._tried(attempt, what, timeout, began)
        # It is not tried again: nobody knows whether it was done.
        spare = left(timeout, began)
        return _committed(home, self._name, turn, share, what, spare, adding=adding)

    @limited
    def fetch(
        self, request: m.Read | m.ReadTag, patience: float | None, timeout: float | None
    ) -> tuple[int, Any, int]:
        what, began = f"read {quoted(self._name)}", time.monotonic()
        lost = ""

        def attempt() -> tuple[int, Any, int] | None:
            nonlocal lost, patience, request
            try:
                home, plan = self._home(what, left(timeout, began))
                used = self._lines.now([task for task, _ in plan.parts])
                found = self._read(home, plan, used, replace(request, hold=True), patience)
            except TimedOut as e:
                raise TimedOut(f"{e}{lost}") from e
            version, tree, nbytes, lacking = found
            if not lacking:
                return version, tree, nbytes
            lost = f"; {_has_lost(lacking, version)}"
            if isinstance(request, m.ReadTag):
                raise Disconnected(f"{what}, tag '{request.tag}'{lost}, and nothing brings it back")
            patience = left(timeout, began)
            request = replace(request, newer_than=version, timeout=patience)
            return None

        return self._tried(attempt, what, timeout, began)

    def _tried(
        self, attempt: Callable[[], R | None], what: str, timeout: float | None, began: float
    ) -> R:
        """What an attempt gives, in the end: made again while it gives nothing, or servers die."""
        found = None
        while found is None:
            found = self._lines.mending(attempt, lambda: self._tasks, what, timeout, began)
        return found

    def call(self, request: m.Request[R]) -> R:
        home, _ = self._home(self._name, 0.0)
        return home.call(request)

    def give_back(self) -> None:
        for line in self._lines.now(self._tasks).values():
            line.give_back()
        if self._near is not None:
            self._near.give_back()

    def move(self, line: Connection, timeout: float | None) -> None:
        """It looks after its lines itself."""

    @property
    def _tasks(self) -> list[str]:
        return [task for task, _ in self._known[1].parts]

    def _home(self, what: str, timeout: float | None) -> tuple[Connection, m.Spreading]:
        """The line to the home, and how the variable is spread."""
        began = time.monotonic()
        with said_of(what, TimedOut):
            line = self._lines.line(self._task, timeout)
            known, plan, _ = self._known
            if line is known:
                return line, plan
            # Its server was started again.
            spare = left(timeout, began)
            defined, buffers = line.exchange(m.Await(self._name, spare), timeout=spare)
        if defined.spread is None:
            raise SchemaError(f"{what}: it is on one server now; find it again")
        self._known = line, defined.spread, hinted(line, defined, buffers)
        return line, defined.spread

    def _read(
        self,
        home: Connection,
        plan: m.Spreading,
        used: Mapping[str, Connection],
        request: m.Read | m.ReadTag,
        patience: float | None,
    ) -> tuple[int, Any, int, list[str]]:
        """A version, its tree and bytes, and who has lost its part of it."""
        name, held = self._name, m.NO_VERSION
        near = None if self._near is None else self._near.of(home)
        request = replace(request, lean=near is not None)

        def undo(reply: m.Value) -> m.LetGo:
            return m.LetGo(name, m.NO_VERSION if reply.version == request.have else reply.version)

        try:
            with home.interrupts:
                value, buffers = home.exchange(request, timeout=patience, undo=undo)
                if value.version == request.have:
                    return value.version, None, 0, []
                held = value.version
            copies = None if near is None else near.copies
            tree, nbytes, lost = fetched(used, name, plan, value, buffers, copies)
            return held, tree, nbytes, lost
        finally:
            if held != m.NO_VERSION:
                with suppress(PacelineError):
                    home.tell(m.LetGo(name, held))

    def _wait_for_assign(
        self,
        home: Connection,
        version: int,
        what: str,
        lost: list[str],
        began: float,
        timeout: float | None,
    ) -> None:
        """Wait for the version that has what was lost: nothing can be added to the current one."""
        spare = left(timeout, began)
        request = m.Read(self._name, version, spare, hold=True)
        try:
            value, _ = home.exchange(request, timeout=spare)
            home.tell(m.LetGo(self._name, value.version))
        except TimedOut as e:
            waited = time.monotonic() - began
            raise TimedOut(f"{what}, after {waited:.1f} s: {_has_lost(lost, version)}") from e


def initialised(
    lines: Lines, name: str, plan: m.Spreading, flat: Flat, timeout: float | None
) -> tuple[Connection, m.Defined, Buffers] | None:
    """Give a variable its first value, or find that it has one; `None` if it is in one place.

    Raises:
        SchemaError: it exists with another structure; the message names the first odd leaf.
        TimedOut: a server that died was not started again in time.
    """
    what, began = f"spread {quoted(name)}", time.monotonic()
    shares = [Share(share) for share in spreading.shares(plan, flat, what)]
    tasks = [task for task, _ in plan.parts]

    def attempt() -> tuple[Connection, m.Defined, Buffers] | None:
        used = _reached(lines, plan, what, left(timeout, began))
        home = used[tasks[0]]
        turn = _begun(home, name, "first", 0.0)
        if turn.stage == 0:
            spare = left(timeout, began)
            defined, buffers = home.exchange(m.Await(name, spare), timeout=spare)
            if defined.spread is None:
                return None
            check(flat.layout, defined.spread.layout, f"variable {quoted(name)}")
            return home, defined, buffers
        _staged(used, name, plan, turn, shares, what, adding=False)
        try:
            with home.interrupts:
                head, block = pack(home.arena, shares[0].tree, what)
                first = m.CommitFirst(name, head, turn.stage, plan)
                return home, *home.exchange(first, [block])
        except BaseException:
            _abandon(home, name, turn)
            raise

    return lines.mending(attempt, lambda: tasks, what, timeout, began)


def _chosen(plan: m.Spreading, leaf: str | None, indices: Array, what: str) -> Table:
    """The table that a leaf is, or all are, which has rows at all the indices; or SchemaError."""
    rows = table(plan.layout, leaf, what)
    rows.check_indices(indices.reshape(-1), indices.shape, what)
    return rows


def _reached(
    lines: Lines, plan: m.Spreading, what: str, timeout: float | None
) -> dict[str, Connection]:
    """The lines to all parts; where a server has died, once it was started again."""
    began = time.monotonic()
    with said_of(what, TimedOut):
        return {task: lines.line(task, left(timeout, began)) for task, _ in plan.parts}


def _begun(
    home: Connection,
    name: str,
    kind: Literal["first", "assign", "add", "rows"],
    timeout: float | None,
) -> m.Staging:
    return home.exchange(
        m.Begin(name, kind, timeout),
        timeout=timeout if kind in ("add", "rows") else 0.0,
        undo=lambda turn: m.Abandon(name, turn.stage),
    )[0]


def _abandon(home: Connection, name: str, turn: m.Staging) -> None:
    with suppress(PacelineError):
        home.tell(m.Abandon(name, turn.stage))


def _staged(
    used: Mapping[str, Connection],
    name: str,
    plan: m.Spreading,
    turn: m.Staging,
    shares: list[Share],
    what: str,
    *,
    adding: bool,
) -> list[str]:
    """Have the others keep their shares of a write; who lacks what it is added to."""
    base = turn.base if adding else None
    pending: list[tuple[str, Pending]] = []
    try:
        for (task, _), share in zip(plan.parts[1:], shares[1:], strict=True):
            line = used[task]
            with line.interrupts:
                head, buffers = share.packed(line.arena, what)
                request = m.Stage(name, head, turn.stage, base, turn.keep, turn.below, share.pieces)
                pending.append((task, line.post(request, buffers)))
        return [task for task, one in pending if not one.result()[0].content]
    except BaseException:
        for _, one in pending:
            one.forget()
        _abandon(used[plan.parts[0][0]], name, turn)
        raise


def _committed(
    home: Connection,
    name: str,
    turn: m.Staging,
    share: Share,
    what: str,
    timeout: float | None,
    *,
    adding: bool,
) -> int:
    try:
        with home.interrupts:
            head, buffers = share.packed(home.arena, what)
            request = m.Commit(name, head, turn.stage, adding, timeout, share.pieces)
            return home.call(request, buffers, 0.0 if adding else timeout).version
    except BaseException:
        _abandon(home, name, turn)
        raise


def _has_lost(tasks: list[str], version: int) -> str:
    return (
        f"{' and '.join(tasks)} lost what it had of version {count_of(version)} when it was started"
        " again; the next assign ends the wait"
    )
