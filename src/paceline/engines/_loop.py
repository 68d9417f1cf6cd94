"""A thread that waits for descriptors and does what other threads ask of it."""

import contextlib
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from paceline.core.errors import Closed

R = TypeVar("R")
P = ParamSpec("P")

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Loop:
    """One lasting thread. It runs `tick` before each wait and waits for as long as that returns.

    An error of the thread, or of whom it tells something, is kept for `raise_kept`. When the thread
    ends, by `end` or by an error, it runs `at_end` and then does what was still asked of it.
    """

    def __init__(
        self, name: str, tick: Callable[[], float | None], at_end: Callable[[], None]
    ) -> None:
        self._tick = tick
        self._at_end = at_end
        self._ending = False
        self._over = False
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._commands: deque[Callable[[], object]] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        self.watch(self._woken, self._on_wake)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def watch(self, descriptor: int, on_ready: Callable[[int], object], events: int = READ) -> None:
        """Call `on_ready(events)` whenever `descriptor` is ready, until `unwatch`."""
        if descriptor in self._selector.get_map():
            self._selector.modify(descriptor, events, on_ready)
        else:
            self._selector.register(descriptor, events, on_ready)

    def unwatch(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the loop's thread."""
        return threading.current_thread() is self._thread

    def post(self, command: Callable[[], object]) -> bool:
        """Have `command` run on the thread, in the order of posting; false when it has ended."""
        with self._lock:
            if self._over:
                return False
            self._commands.append(command)
            with contextlib.suppress(BlockingIOError):  # full: it will wake
                os.write(self._wake, b"!")
            return True

    def call(self, what: str, command: Callable[[], R]) -> R:
        """Run `command` on the thread, from wherever this is called, and return its result.

        Raises:
            Closed: the thread has ended; the message says `what` was asked.
        """
        if self.is_here:
            return command()
        future: Future[R] = Future()

        def answer() -> None:
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        if not self.post(answer):
            raise Closed(f"{what}: the engine is closed")
        return future.result()

    def tell(self, hearer: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `hearer`; keep the error that it raises."""
        try:
            hearer(*args, **kwargs)
        except Exception as error:
            self._error = self._error or error

    def raise_kept(self) -> None:
        """Raise the first error since the last call, if there was one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end(self) -> None:
        """Let the thread end; called on it."""
        self._ending = True

    def join(self, timeout: float) -> bool:
        """Wait for the end of the thread; false when it has not ended."""
        # After a Ctrl-C in its own join, Python 3.11 takes a thread for ended.
        if not self._ended.wait(max(0.0, timeout)):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        try:
            while not self._ending:
                for key, events in self._selector.select(self._tick()):
                    key.data(events)
        except Exception as error:
            self._error = self._error or error
        finally:
            self.tell(self._at_end)
            with self._lock:
                self._over = True
            self._obey()
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)
            self._ended.set()

    def _on_wake(self, events: int) -> None:
        os.read(self._woken, 4096)
        self._obey()

    def _obey(self) -> None:
        while self._commands:
            self.tell(self._commands.popleft())
