"""What a function learns of the worker that it runs in."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from paceline.core import messages as m
from paceline.core.account import Account, Times
from paceline.core.errors import PacelineError, SchemaError, TimedOut, WouldBlock
from paceline.core.names import parts
from paceline.core.tree import build, decoded, flatten
from paceline.engines.base import Link
from paceline.pending import within
from paceline.session import Session
from paceline.worker.line import Setup, StopJob, black_box

TELL_EVERY = 0.1
"""Seconds between what a worker tells of its time."""


class Worker:
    """What a function learns of the worker that it runs in.

    Attributes:
        job: the group of workers that it belongs to.
        index: its number among them, from 0.
        seed: for random numbers; it differs between workers, and after a restart.
        session: its session, to find other variables and queues.
    """

    def __init__(self, setup: Setup, session: Session, link: Link) -> None:
        self.job = setup.job
        self.index = setup.index
        self.seed = setup.seed
        self.session = session
        self._link = link
        self.box = black_box(setup.box)
        session.lines.conduct.on_read = self.box.read
        self.later: list[object] = []
        self._logged: dict[str, list[float]] = {}
        self._stopped: set[str | int] = set()
        self._current: str | int = ""
        self._hung_up = False
        self._told = 0.0

    def __repr__(self) -> str:
        return f"<Worker {self.job}:{self.index}, seed {self.seed}>"

    def log(self, **metrics: float) -> None:
        """Note numbers that travel with the next item: `batch.metrics`, and the progress line.

        Under one name several values may be noted for one item. `steps` is summed up and shown as a
        rate; of other names the progress line shows the mean of the newest.

        Raises:
            SchemaError: a value is no number.
        """
        for name, value in metrics.items():
            try:
                number = float(value)
            except (TypeError, ValueError):
                raise SchemaError(
                    f"worker.log({name}={value!r}): a number is noted; what else an item has to say"
                    " belongs into the item"
                ) from None
            self._logged.setdefault(name, []).append(number)

    def should_stop(self) -> bool:
        """Whether nobody wants what the function makes; one that takes long can look."""
        self._listen()
        stopped = self._hung_up or self._current in self._stopped
        return stopped or not self.session.lines.alive()

    def keep(self, tree: Any) -> None:
        """Keep a tree for whoever is this worker after a restart, or after `session.restore`.

        Copied, in the place of what was kept before, whose structure it has. It is a variable of
        this session's container, for this job and index, and for this collection; or for all calls.

        Raises:
            SchemaError: it may not travel, or has another structure; the message names the leaf.
        """
        self.session.variable(self._kept, tree, overwrite=True)

    @property
    def kept(self) -> Any:
        """What a worker of this job and index kept last; `None` if none has. It owns its memory."""
        try:
            found = within(None, self.session.variable, self._kept, timeout=0.0).read()
        except (TimedOut, WouldBlock):
            return None
        flat = flatten(found.tree)
        return build(decoded(flat.layout), flat.values, (array.copy() for array in flat.arrays))

    @property
    def _kept(self) -> str:
        work = parts(self._current).name if isinstance(self._current, str) else "calls"
        return f"kept by {self.job}:{self.index} for {work}"

    def take_logged(self) -> dict[str, list[float]] | None:
        """What was noted since the last item."""
        logged, self._logged = self._logged, {}
        return logged or None

    @property
    def account(self) -> Account:
        """Where this worker's time goes."""
        account = self.session.lines.conduct.account
        assert account is not None
        return account

    def turn_to(self, cause: str) -> None:
        """Do something else from now on, and tell the server now and then how it went."""
        self.account.enter(cause)
        times = self.news()
        with suppress(PacelineError):  # whoever asks next hears of a lost server
            # What a function let go of as it ended is of use to others now.
            for line in self.session.lines.all:
                line.give_back()
            if times is not None:
                self.session.connection.tell(m.Report(times))

    def news(self) -> Times | None:
        """Where the time went, if that was not told a moment ago."""
        now = time.monotonic()
        if now - self._told < TELL_EVERY:
            return None
        self._told = now
        return self.account.times()

    def begin(self, work: str | int) -> None:
        """A function starts, for a collection or a call."""
        self._current = work
        self.box.begin()
        self._stopped &= {work}
        self._logged = {}

    def tell(self, message: object) -> None:
        """Tell the launcher something."""
        self._link.send(message)

    def _listen(self) -> None:
        try:
            while True:
                message = self._link.receive(0)
                if isinstance(message, StopJob):
                    self._stopped.add(message.work)
                else:
                    self.later.append(message)
        except TimedOut:
            return
        except EOFError:
            self._hung_up = True
