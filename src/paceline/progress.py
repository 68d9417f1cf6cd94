"""How a run goes, in a few words that live, or in plain lines where there is no terminal."""

from __future__ import annotations

import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, final

from paceline.collection import Collection
from paceline.core.errors import PacelineError

Mode: TypeAlias = Literal["auto", "live", "plain", "quiet"]

SAMPLE_EVERY = 0.25
LIVE_WINDOW = 3.0
PLAIN_FIRST = 1.0
PLAIN_EVERY = 10.0
METRICS = 6
"""Logged names that are shown; where there are more, their number is."""


class Progress(ABC):
    """Shows the collections of one cluster."""

    @abstractmethod
    def update(self, collection: Collection[Any]) -> None:
        """A collection was opened or closed, or has handed over a batch."""

    @abstractmethod
    def close(self) -> None:
        """Say how it ended, and stop. Idempotent."""


@final
class Quiet(Progress):
    """Shows nothing."""

    def update(self, collection: Collection[Any]) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is shown."""


class Sample(NamedTuple):
    """A collection's totals at one time, and the share of its workers that waited then."""

    time: float
    batches: int
    items: int
    steps: float
    trainer_waited: float
    workers_waiting: float


@final
class Line:
    """The words on one collection; rates are those of the last `window` seconds."""

    def __init__(self, collection: Collection[Any], window: float) -> None:
        self._collection = collection
        self._stats: dict[str, Any] = {}
        first = Sample(collection.tally.began, 0, 0, 0.0, 0.0, 0.0)
        self._samples = deque([first], maxlen=1 + round(window / SAMPLE_EVERY))

    def sample(self) -> None:
        """Look at the collection now; what its server does not answer stays as it was."""
        tally = self._collection.tally
        try:
            self._stats = stats = self._collection.stats()
        except PacelineError:
            stats = self._stats
        waiting, making = stats.get("workers_waiting", 0), stats.get("workers_making", 0)
        share = waiting / max(1, waiting + making)
        now, waited = time.monotonic(), tally.waited_now
        self._samples.append(Sample(now, tally.batches, tally.items, tally.steps, waited, share))

    def words(self) -> list[str]:
        """What matters now, part by part."""
        tally, stats = self._collection.tally, self._stats
        before, now = self._samples[0], self._samples[-1]
        parts = [self._collection.name]
        if now.batches > before.batches:
            parts += _rates(before, now)
        elif now.batches:
            parts.append(f"no batch for {now.time - tally.newest_at:.0f} s")
        else:
            parts.append(f"no batch yet, {now.time - tally.began:.0f} s")
        parts += _metrics(tally.means())
        if stats.get("version") is not None:
            parts.append(f"version {stats['version']}")
            parts.append(f"lag {tally.lag}")
        if stats:
            parts.append(f"queue {stats['stored']}/{stats['capacity']}")
        return parts + _dropped(stats) + self._waits(before, now)

    def summary(self) -> list[str]:
        """How it went, from its first batch to its last, part by part."""
        tally, stats = self._collection.tally, self._stats
        span = max(1e-9, tally.newest_at - tally.began)
        whole = Sample(tally.newest_at, tally.batches, tally.items, tally.steps, tally.waited, 0.0)
        parts = [f"{self._collection.name}: {tally.batches:,} batches in {span:.1f} s"]
        parts += _rates(Sample(tally.began, 0, 0, 0.0, 0.0, 0.0), whole)
        parts += _metrics(tally.means())
        if stats.get("version") is not None:
            parts.append(f"lag <= {stats['max_lag_seen']}")
        return parts + _dropped(stats) + [f"trainer waited {min(1.0, tally.waited / span):.0%}"]

    def _waits(self, before: Sample, now: Sample) -> list[str]:
        span = max(1e-9, now.time - before.time)
        trainer = min(1.0, max(0.0, now.trainer_waited - before.trainer_waited) / span)
        seen = list(self._samples)[1:]
        workers = sum(sample.workers_waiting for sample in seen) / max(1, len(seen))
        return [
            f"trainer waits for workers {trainer:.0%}",
            f"workers wait for trainer {workers:.0%}",
        ]


def _rates(before: Sample, now: Sample) -> list[str]:
    span = max(1e-9, now.time - before.time)
    done = f"{_number((now.items - before.items) / span)} items/s"
    if now.steps:
        done = f"{_number((now.steps - before.steps) / span)} steps/s"
    return [done, f"{_number((now.batches - before.batches) / span)} batches/s"]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _metrics(means: dict[str, float]) -> list[str]:
    parts = [f"{name} {value:.4g}" for name, value in list(means.items())[:METRICS]]
    return parts + ([f"+{len(means) - METRICS} more"] if len(means) > METRICS else [])


def _dropped(stats: dict[str, Any]) -> list[str]:
    # What was left over when the collection ended was not in anyone's way.
    reasons = [f"{n} {why}" for why, n in stats.get("dropped", {}).items() if n and why != "closed"]
    return ["dropped " + ", ".join(reasons)] if reasons else []


def wrapped(words: list[str], width: int) -> list[str]:
    """Lines of whole words, two spaces apart, none above `width` unless it is a single word."""
    lines = words[:1]
    for word in words[1:]:
        if len(lines[-1]) + 2 + len(word) <= width:
            lines[-1] += f"  {word}"
        else:
            lines.append(word)
    return lines


@final
class Board:
    """The lines of the collections that are open.

    With `ticks`, every quarter of a second a thread of its own takes samples and calls `show`;
    without, that is done by whoever updates it.
    """

    def __init__(self, window: float, show: Callable[[], None], *, ticks: bool) -> None:
        self.lines: dict[Collection[Any], Line] = {}
        self.lock = threading.RLock()
        self._window = window
        self._show = show
        self._ticks = ticks
        self._due = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def update(self, collection: Collection[Any]) -> Line | None:
        """Take note of a collection; its line, if it is closed and had handed over anything."""
        line = self.lines.get(collection)
        if not collection.closed and not self._ended.is_set():
            if line is None:
                self._open(collection)
            elif not self._ticks and time.monotonic() >= self._due:
                self._tick()
            return None
        with self.lock:
            line = self.lines.pop(collection, None)
        if line is not None:
            line.sample()
        return line if collection.tally.batches else None

    def close(self) -> list[Line]:
        """End the thread; the lines of what is still open and has handed over anything."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with self.lock:
            lines, self.lines = self.lines, {}
        for line in lines.values():
            line.sample()
        return [line for collection, line in lines.items() if collection.tally.batches]

    def _open(self, collection: Collection[Any]) -> None:
        with self.lock:
            self.lines[collection] = Line(collection, self._window)
        if self._ticks and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-progress", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY):
            try:
                self._tick()
            except (OSError, ValueError):
                # The terminal is gone, which is no reason to end the run.
                return

    def _tick(self) -> None:
        self._due = time.monotonic() + SAMPLE_EVERY
        with self.lock:
            lines = list(self.lines.values())
        for line in lines:
            line.sample()
        self._show()


@final
class Plain(Progress):
    """A line after one second, two, four, eight and then every ten; and one at the end."""

    def __init__(self, *, ticks: bool) -> None:
        self._board = Board(PLAIN_EVERY, self._show, ticks=ticks)
        self._pause = PLAIN_FIRST
        self._next = time.monotonic() + self._pause

    def update(self, collection: Collection[Any]) -> None:
        ended = self._board.update(collection)
        if ended is not None:
            _say(ended.summary())

    def close(self) -> None:
        for line in self._board.close():
            _say(line.summary())

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._pause = min(PLAIN_EVERY, 2 * self._pause)
        self._next = now + self._pause
        with self._board.lock:
            texts = [line.words() for line in self._board.lines.values()]
        for words in texts:
            _say(words)


def _say(words: list[str]) -> None:
    sys.stderr.write("  ".join(words) + "\n")
    sys.stderr.flush()


@final
class Live(Progress):
    """The newest words at the bottom of the terminal; what else is printed scrolls above them."""

    def __init__(self, *, ticks: bool) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive
        from rich.text import Text

        self._text = Text
        self._console = Console(stderr=True)
        self._live = RichLive(
            self,
            console=self._console,
            auto_refresh=False,
            transient=True,
            # Output that goes to a file must still go there.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._board = Board(LIVE_WINDOW, self._live.refresh, ticks=ticks)

    def update(self, collection: Collection[Any]) -> None:
        if not collection.closed and not self._live.is_started:
            self._live.start()
        ended = self._board.update(collection)
        if ended is not None:
            self._say(ended)

    def close(self) -> None:
        lines = self._board.close()
        self._live.stop()
        for line in lines:
            self._say(line)

    def _say(self, line: Line) -> None:
        for text in wrapped(line.summary(), self._console.width):
            self._console.print(self._text(text))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Each collection on lines of its own, broken between words only."""
        with self._board.lock:
            texts = [line.words() for line in self._board.lines.values()]
        # Room for the ^C that a terminal echoes, lest it break the last line.
        width = options.max_width - 2
        for words in texts:
            for text in wrapped(words, width):
                yield self._text(text, style="cyan", no_wrap=True, overflow="ellipsis")


def progress(mode: Mode, *, ticks: bool = True) -> Progress:
    """The display of that mode; `auto` is live on a terminal, plain elsewhere.

    `ticks=False` is for runs in one thread: what is shown changes when a batch is handed over.
    """
    if mode == "auto":
        able = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        mode = "live" if able else "plain"
    if mode == "quiet":
        return Quiet()
    kinds: dict[str, type[Live | Plain]] = {"live": Live, "plain": Plain}
    if mode not in kinds:
        raise ValueError(f"progress={mode!r}; there are 'auto', 'live', 'plain', 'quiet'")
    return kinds[mode](ticks=ticks)
