"""Which connections are ready: `selectors` with less between the system call and the answer."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Any

from paceline.core.account import BUSY, Account

# As POSIX numbers them, and epoll too.
READ, WRITE = 1, 4

LONGEST = 3600.0
"""Seconds of one wait: system calls refuse some 25 days or more."""

Ready = Callable[[int], None]


class Poller:
    """Calls back with the events of each descriptor that is ready.

    A closed descriptor must be forgotten before its number is used again.
    """

    def __init__(self) -> None:
        self._epoll: Any = select.epoll() if hasattr(select, "epoll") else None
        self._poll: Any = select.poll() if self._epoll is None else self._epoll
        self._callbacks: dict[int, Ready] = {}

    def watch(self, fd: int, on_ready: Ready) -> None:
        """Call `on_ready` whenever `fd` can be read, or its other end is gone."""
        self._poll.register(fd, READ)
        self._callbacks[fd] = on_ready

    def hand(self, fd: int, on_ready: Ready) -> None:
        """Call another back from now on."""
        self._callbacks[fd] = on_ready

    def want(self, fd: int, events: int) -> None:
        """Be called for these events from now on."""
        self._poll.modify(fd, events)

    def forget(self, fd: int) -> None:
        """Watch `fd` no more."""
        del self._callbacks[fd]
        self._poll.unregister(fd)

    def wait(self, timeout: float | None, account: Account) -> None:
        """Wait until something is ready, at most `timeout` seconds, and call back: busy, then."""
        if timeout is not None:
            timeout = min(timeout, LONGEST)
        if self._epoll is not None:
            ready = self._epoll.poll(timeout)
        else:
            ready = self._poll.poll(None if timeout is None else timeout * 1000)
        account.enter(BUSY)
        callbacks = self._callbacks
        for fd, events in ready:
            # One callback may have ended the connection of another.
            on_ready = callbacks.get(fd)
            if on_ready is not None:
                on_ready(events)

    def close(self) -> None:
        """Watch nothing any more."""
        self._callbacks.clear()
        if self._epoll is not None:
            self._epoll.close()


def sooner(limit: float | None, other: float) -> float:
    return other if limit is None else min(limit, other)
