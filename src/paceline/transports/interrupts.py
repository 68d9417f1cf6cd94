"""Ctrl-C, kept from the midst of a frame: it is heard between two steps, never inside one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

R = TypeVar("R")

TICK = 0.1
"""Seconds after which a wait that a signal cannot end looks whether there was one."""

# What Python's own functions wrap: making members of enums takes longer than a short call may.
_plain: Any = sys.modules.get("_signal", signal)
_handler: Callable[[int], Any] = _plain.getsignal
_handle: Callable[[int, Any], Any] = _plain.signal
_SIGINT = int(signal.SIGINT)

_MARK = "__paceline_signal__"


class Interrupts:
    """In a `with` block SIGINT is kept until `check`, a wait through this object, or its end.

    Then the handler that there was is called, which usually raises `KeyboardInterrupt`. Only the
    main thread is ever interrupted; in others none of this does anything.
    """

    __slots__ = ("_before", "_came", "_heard", "_outer")

    def __init__(self) -> None:
        self._before: Any = None
        self._came = False
        # Whether it is heard at once now, and whether it was in the blocks around this one.
        self._heard = False
        self._outer: list[bool] = []

    def __enter__(self) -> Interrupts:
        if _in_main():
            if not self._outer:
                before = _handler(_SIGINT)
                self._before = before if callable(before) else None
                if self._before is not None:
                    _handle(_SIGINT, self._arrived)
            self._outer.append(self._heard)
            self._heard = False
        return self

    def __exit__(self, *_: object) -> None:
        before = self._before
        if self._left() and self._came and before is not None:
            self._came = False
            _hear(before, None)

    def silently(self, call: Callable[[], None]) -> None:
        """Make a call where nothing may be raised: what came is heard in the next block."""
        self.__enter__()
        try:
            call()
        finally:
            self._left()

    def _left(self) -> bool:
        """End a block; whether it was the outermost."""
        if not self._outer or not _in_main():
            return False
        self._heard = self._outer.pop()
        if self._outer:
            return False
        if self._before is not None and _handler(_SIGINT) == self._arrived:
            _handle(_SIGINT, self._before)
        self._before = None
        return True

    @property
    def kept(self) -> bool:
        """Whether this thread is in such a block."""
        return bool(self._outer) and _in_main()

    def check(self) -> None:
        """Hear now what came."""
        if self._came and self.kept and self._before is not None:
            self._came = False
            _hear(self._before, None)

    def limit(self, seconds: float | None) -> float | None:
        """How long to wait for something else before the next `check`."""
        if not self.kept:
            return seconds
        return TICK if seconds is None else min(TICK, seconds)

    def during(self, call: Callable[..., R], *arguments: Any) -> R:
        """Make a call in which SIGINT is heard at once: nothing that it returns may be needed."""
        if not self.kept:
            return call(*arguments)
        outer, self._heard = self._heard, True
        try:
            self.check()
            return call(*arguments)
        finally:
            self._heard = outer

    def _arrived(self, number: int, frame: Any) -> None:
        if not self._heard:
            self._came = True
            return
        # Not again before this is over, wherever it came.
        self._heard = False
        _hear(self._before, frame)
        self._heard = True


def from_signal(error: BaseException) -> bool:
    """Whether it is what the handler of a signal raised that these blocks have let through."""
    return getattr(error, _MARK, False)


def _hear(handler: Callable[[int, Any], Any], frame: Any) -> None:
    try:
        handler(_SIGINT, frame)
    except BaseException as e:
        setattr(e, _MARK, True)
        raise


def _in_main() -> bool:
    return threading.get_ident() == threading.main_thread().ident
