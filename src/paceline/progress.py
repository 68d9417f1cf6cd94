"""How a run goes, in one line that lives, or in plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from typing import Any, Literal, TypeAlias

from paceline.collection import Collection
from paceline.core.errors import PacelineError

Mode: TypeAlias = Literal["auto", "live", "plain", "quiet"]

PLAIN_EVERY = 10.0
LIVE_PER_SECOND = 4.0


class Progress(ABC):
    """Shows the newest collection."""

    @abstractmethod
    def update(self, collection: Collection[Any]) -> None:
        """A batch was handed over."""

    @abstractmethod
    def close(self) -> None:
        """Say how it ended, and stop."""


class Quiet(Progress):
    """Shows nothing."""

    def update(self, collection: Collection[Any]) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing is shown."""


class Line:
    """The words of a progress line; rates are those since the last line."""

    def __init__(self) -> None:
        self._last: tuple[float, float, int, float] | None = None

    def words(self, collection: Collection[Any]) -> list[str]:
        """What matters now, part by part."""
        tally = collection.tally
        now, waited = time.monotonic(), tally.waited_now
        began, steps, batches, before = self._last or (tally.began, 0.0, 0, 0.0)
        span = max(1e-9, now - began)
        parts = [collection.name]
        if tally.steps:
            parts.append(f"{(tally.steps - steps) / span:,.0f} steps/s")
        parts.append(f"{(tally.batches - batches) / span:.1f} batches/s")
        parts += [f"{name} {value:.4g}" for name, value in tally.means().items()]
        try:
            stats = collection.stats()
        except PacelineError:
            return parts
        finally:
            self._last = (now, tally.steps, tally.batches, waited)
        if stats["version"] is not None:
            parts.append(f"version {stats['version']}, lag {tally.lag}")
        parts.append(f"queue {stats['stored']}/{stats['capacity']}")
        if stats["dropped"]:
            parts.append("dropped " + ", ".join(f"{n} {r}" for r, n in stats["dropped"].items()))
        share = min(1.0, (waited - before) / span)
        parts.append(
            f"trainer waits for workers {share:.0%}"
            if share > 0.5
            else f"trainer busy {1 - share:.0%}" + ("" if stats["running"] else ", workers wait")
        )
        return parts


class Plain(Progress):
    """A line every ten seconds, and one at the end."""

    def __init__(self) -> None:
        self._line = Line()
        self._next = time.monotonic() + PLAIN_EVERY
        self._unsaid: Collection[Any] | None = None

    def update(self, collection: Collection[Any]) -> None:
        self._unsaid = collection
        if time.monotonic() >= self._next:
            self._say()

    def close(self) -> None:
        self._say()

    def _say(self) -> None:
        if self._unsaid is not None:
            sys.stderr.write("  ".join(self._line.words(self._unsaid)) + "\n")
        self._unsaid = None
        self._next = time.monotonic() + PLAIN_EVERY


class Live(Progress):
    """One line at the bottom of the terminal; what else is printed scrolls above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live as RichLive

        self._line = Line()
        self._collection: Collection[Any] | None = None
        self._live = RichLive(
            console=Console(stderr=True),
            get_renderable=self._text,
            refresh_per_second=LIVE_PER_SECOND,
        )
        self._started = False

    def update(self, collection: Collection[Any]) -> None:
        self._collection = collection
        if not self._started:
            self._started = True
            self._live.start()

    def close(self) -> None:
        if self._started:
            self._live.stop()

    def _text(self) -> Any:
        from rich.text import Text

        if self._collection is None:
            return Text("")
        return Text(
            "  ".join(self._line.words(self._collection)), style="cyan", overflow="ellipsis"
        )


def progress(mode: Mode) -> Progress:
    """The display of that mode; `auto` is live on a terminal, plain elsewhere."""
    if mode == "auto":
        mode = "live" if sys.stderr.isatty() else "plain"
    kinds: dict[str, type[Progress]] = {"live": Live, "plain": Plain, "quiet": Quiet}
    if mode not in kinds:
        raise ValueError(f"progress={mode!r}; there are 'auto', {', '.join(map(repr, kinds))}")
    return kinds[mode]()
