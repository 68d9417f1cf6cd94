"""Requests that wait: parked, asked again in order when their resource changes, ended in time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.core.clock import Clock
from paceline.core.errors import PacelineError, TimedOut
from paceline.core.waiting import HELD_BACK, NOT_YET, HeldBack, NotYet

SPARE = 64
"""Deadlines of answered requests that may be kept besides as many as there are live ones."""


TOGETHER = ("together",)
"""What those wait for who need several things at once: they are asked after every change."""


class Parked:
    """One waiting request: `attempt()` answers or says "not yet"; `answer` takes what it says.

    `about` is the key of what it was made to, if that is in a container.
    """

    __slots__ = (
        "about",
        "answer",
        "attempt",
        "done",
        "held_back",
        "number",
        "peer",
        "place",
        "since",
        "what",
    )

    def __init__(
        self,
        peer: object,
        number: int,
        what: Callable[[], str],
        attempt: Callable[[], Any],
        answer: Callable[[Any], None],
        about: str | None = None,
    ) -> None:
        self.peer = peer
        self.number = number
        self.what = what
        self.attempt = attempt
        self.answer = answer
        self.about = about
        self.since = 0.0
        self.place = 0
        self.done = False
        self.held_back = False


class Parking:
    """All waiting requests of a server, by what they wait for."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._by_key: dict[Hashable, list[Parked]] = {}
        # An answered request is forgotten at once, and with it the memory that its attempt holds;
        # its deadline, only a pair of numbers, may stay in the heap for a while.
        self._timed: dict[int, Parked] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._order = itertools.count(1)
        self._dirty: deque[tuple[Hashable, bool]] = deque()
        self._asking = False
        self._refused: dict[object, dict[Hashable, PacelineError]] = {}

    def park(self, key: Hashable, request: Parked, timeout: float | None) -> None:
        """Let a request wait for `key` to change, at most `timeout` seconds."""
        if request.peer in self._refused:
            request.done = True
            request.answer(next(iter(self._refused[request.peer].values())))
            return
        request.since = self._clock.now()
        self._by_key.setdefault(key, []).append(request)
        if timeout is not None:
            request.place = next(self._order)
            self._timed[request.place] = request
            heapq.heappush(self._deadlines, (request.since + timeout, request.place))

    def waiting(self, key: Hashable) -> int:
        """How many wait for `key`."""
        return len(self._by_key.get(key, ()))

    def waits_of(self, peer: object) -> list[tuple[Hashable, float]]:
        """What a peer waits for, and for how many seconds it has."""
        now = self._clock.now()
        return [
            (key, now - request.since)
            for key, queue in self._by_key.items()
            for request in queue
            if request.peer is peer
        ]

    def standing(self, peer: object, key: Hashable) -> NotYet | HeldBack | None:
        """Why what `peer` asks now has to wait behind those who wait; `None` if it need not."""
        waiting = self._by_key.get(key, ())
        if not all(request.held_back for request in waiting):
            return NOT_YET
        return HELD_BACK if any(request.peer is peer for request in waiting) else None

    def changed(self, key: Hashable, *, in_order: bool = False) -> None:
        """Ask those waiting for `key` again; with `in_order` none passes one that must still wait.

        One that is held back by a bound of its own is passed by others, but not by its peer's.
        What an answer changes in turn is looked at afterwards, in the order it changed.
        """
        if key in self._by_key:
            self._dirty.append((key, in_order))
        if TOGETHER in self._by_key and key != TOGETHER:
            self._dirty.append((TOGETHER, False))
        if self._dirty and not self._asking:
            with self.one_step():
                """What is dirty is asked at its end."""

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Ask nobody again before all changes of the block have been made."""
        if self._asking:
            yield
            return
        self._asking = True
        try:
            yield
            while self._dirty:
                self._ask_all(*self._dirty.popleft())
        finally:
            self._asking = False

    def _ask_all(self, key: Hashable, in_order: bool) -> None:
        waiting = self._by_key.get(key, [])
        stuck = False
        held_back: set[object] = set()
        for request in waiting:
            if request.done or (in_order and stuck):
                continue
            if in_order and request.peer in held_back:
                request.held_back = True
            elif not self._ask(request):
                stuck = not request.held_back
                held_back.add(request.peer)
        # Not `waiting`: an answer may have put another list in its place.
        left = self._by_key.get(key, ())
        self._keep(key, [request for request in left if not request.done])

    def _ask(self, request: Parked) -> bool:
        try:
            result = request.attempt()
        except Exception as e:
            result = e
        request.held_back = result is HELD_BACK
        if result is NOT_YET or request.held_back:
            return False
        self._finish(request)
        request.answer(result)
        return True

    def cancel(self, peer: object, number: int) -> None:
        """End one wait; what it waited for has not happened."""
        for request in self._all():
            if request.peer is peer and request.number == number and not request.done:
                self._end(request, TimedOut(f"{request.what()}: cancelled"))

    def interrupt(self, peer: object, cause: Hashable, error: PacelineError) -> None:
        """End all waits of a peer with `error`, and those it begins before `allow` of that cause.

        What they waited for has not happened. Of several causes the first is told.
        """
        self._refused.setdefault(peer, {})[cause] = error
        for request in self._all():
            if request.peer is peer:
                self._end(request, error)

    def end_those(self, gone: Callable[[str], bool], error: Callable[[str], PacelineError]) -> None:
        """End all waits about a key that is gone, before anything they held comes to others."""
        ended = [one for one in self._all() if one.about is not None and gone(one.about)]
        for request in ended:
            self._finish(request)
        for key, waiting in list(self._by_key.items()):
            self._keep(key, [request for request in waiting if not request.done])
        for request in ended:
            assert request.about is not None
            request.answer(error(request.about))

    def allow(self, peer: object, cause: Hashable) -> None:
        """Let a peer wait again, unless there is another cause why it may not."""
        causes = self._refused.get(peer, {})
        causes.pop(cause, None)
        if not causes:
            self._refused.pop(peer, None)

    def lost(self, peer: object) -> None:
        """Forget all waits of a peer that is gone."""
        self._refused.pop(peer, None)
        for key in list(self._by_key):
            kept = [request for request in self._by_key[key] if request.peer is not peer]
            for request in self._by_key[key]:
                if request.peer is peer:
                    self._finish(request)
            self._keep(key, kept)

    @property
    def timed(self) -> bool:
        """Whether a wait with a time limit may be among them."""
        return bool(self._timed)

    def expire(self) -> None:
        """End the waits whose time is up."""
        now = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, place = heapq.heappop(self._deadlines)
            request = self._timed.get(place)
            if request is not None:
                waited = now - request.since
                self._end(request, TimedOut(f"{request.what()}, after {waited:.1f} s"))

    def next_deadline(self) -> float | None:
        """Seconds until `expire` has something to do; `None` when it never will."""
        while self._deadlines and self._deadlines[0][1] not in self._timed:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - self._clock.now())

    def _end(self, request: Parked, error: PacelineError) -> None:
        self._finish(request)
        for key, queue in list(self._by_key.items()):
            if request in queue:
                self._keep(key, [other for other in queue if other is not request])
        request.answer(error)

    def _finish(self, request: Parked) -> None:
        request.done = True
        if self._timed.pop(request.place, None) is None:
            return
        if len(self._deadlines) > 2 * len(self._timed) + SPARE:
            self._deadlines = [pair for pair in self._deadlines if pair[1] in self._timed]
            heapq.heapify(self._deadlines)

    def _keep(self, key: Hashable, kept: list[Parked]) -> None:
        if kept:
            self._by_key[key] = kept
        else:
            self._by_key.pop(key, None)

    def _all(self) -> list[Parked]:
        return [request for queue in self._by_key.values() for request in queue]
