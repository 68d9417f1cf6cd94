"""A shared list of work: each piece is done once per epoch, whoever dies.

In every epoch, at every step: pieces = done + held + waiting.
"""

from __future__ import annotations

import collections
import hashlib
import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from paceline.core.errors import Closed, SchemaError
from paceline.core.facts import Noted, Piece, ReaderFacts
from paceline.core.messages.replies import RunHead
from paceline.core.waiting import NOT_YET, NotYet

PIECES = 1 << 20
"""Pieces that a reader may hold."""

BYTES = 1 << 28
"""Bytes that they may take."""

RUN = 4096
"""Pieces that are noted together at most."""

EPOCHS = 16
"""Epochs whose counters are kept; those that go on are kept always."""

Content: TypeAlias = tuple[bytes, list[Any]]
"""A piece: its layout and its plain values."""


class Terms(NamedTuple):
    """How the pieces of a reader are handed out.

    Attributes:
        epochs: how often each piece is, `None` for ever.
        lease: seconds after which a piece that is not done is handed out again.
        stream: whether pieces may be added until it is closed.
    """

    epochs: int | None = 1
    shuffle: bool = False
    seed: int = 0
    lease: float | None = None
    stream: bool = False


class Handed(NamedTuple):
    """A piece in somebody's hands; `place` is its place in the order of its epoch."""

    delivery: int
    holder: Hashable
    epoch: int
    place: int
    number: int
    attempt: int


@dataclass(slots=True)
class EpochCounters:
    """What became of the pieces of one epoch; `delivered` counts the redelivered too."""

    pieces: int
    delivered: int = 0
    redelivered: int = 0
    done: int = 0


class ReaderState:
    """Pieces, who holds which, and which are to be handed out next.

    A piece that comes back is the next one. Otherwise an epoch's pieces go out in their order, and
    those of the next epoch after the last one: an epoch begins while pieces of the one before are
    still held. When all pieces of the last epoch are done, everyone is told that there are no more.

    Raises:
        SchemaError: these terms cannot be kept, or there are too many pieces.
    """

    def __init__(self, name: str, pieces: list[Content], terms: Terms) -> None:
        self.name = name
        self.terms = terms
        self.nbytes = 0
        self.closed = not terms.stream
        """Whether nothing may be added any more."""
        self.epoch = 0
        """The newest that has begun; the first is 0."""
        self._last = terms.epochs
        self._content: dict[int, Content] = {}
        self._count = 0
        self._fresh: Iterator[int] | deque[int] = deque()
        self._left = 0
        self._place = 0
        self._returned: list[tuple[int, int, int, int]] = []
        self._held: dict[int, Handed] = {}
        self._deliveries = 0
        self._epochs: dict[int, EpochCounters] = {0: EpochCounters(0)}
        self._check(pieces)
        self._digest = hashlib.sha256(msgspec.msgpack.encode(pieces)).hexdigest()[:8]
        self._given = len(pieces)
        self._take_in(pieces)
        if not terms.stream:
            self._begin(0)

    @property
    def definition(self) -> dict[str, Any]:
        """What it was made with."""
        return {"pieces": f"{self._given}, digest {self._digest}", **self.terms._asdict()}

    def next(self, holder: Hashable) -> Handed | NotYet | None:
        """The next piece for `holder`; `None` when there will be no more."""
        if self._returned:
            epoch, place, number, attempt = heapq.heappop(self._returned)
            return self._hand(holder, epoch, place, number, attempt + 1)
        if not self._left and not self.terms.stream and self._goes_on():
            self._begin(self.epoch + 1)
        if self._left:
            fresh = self._fresh
            number = fresh.popleft() if isinstance(fresh, deque) else next(fresh)
            self._left -= 1
            self._place += 1
            return self._hand(holder, self.epoch, self._place, number, 1)
        return NOT_YET if self._held or not self.closed else None

    def content(self, number: int) -> Content:
        """What a piece that is held says."""
        return self._content[number]

    def holds(self, delivery: int) -> bool:
        """Whether that piece is in somebody's hands."""
        return delivery in self._held

    def end(self, delivery: int, holder: Hashable, *, returned: bool = False) -> bool:
        """A piece is done, or comes back; whether `holder` had it still."""
        handed = self._held.get(delivery)
        if handed is None or handed.holder is not holder:
            return False
        if returned:
            self.expire(delivery)
            return True
        del self._held[delivery]
        counters = self._epochs[handed.epoch]
        counters.done += 1
        if self.terms.stream:
            self.nbytes -= _size(self._content.pop(handed.number))
        self._forget()
        return True

    def expire(self, delivery: int) -> None:
        """Take a piece back from its holder."""
        handed = self._held.pop(delivery, None)
        if handed is not None:
            back = (handed.epoch, handed.place, handed.number, handed.attempt)
            heapq.heappush(self._returned, back)

    def lost(self, holder: Hashable) -> list[int]:
        """Somebody is gone: what they held comes back. These deliveries."""
        mine = [each.delivery for each in self._held.values() if each.holder is holder]
        for delivery in mine:
            self.expire(delivery)
        return mine

    def add(self, pieces: list[Content]) -> None:
        """Append pieces, all or none.

        Raises:
            Closed: it was closed.
            SchemaError: it is no stream, or there is no room for all of them.
        """
        if not self.terms.stream:
            raise SchemaError(
                f"reader '{self.name}': it is a list of {self._given} pieces; to add pieces, make"
                " it with stream=True"
            )
        if self.closed:
            raise Closed(f"add to reader '{self.name}': it is closed")
        self._check(pieces)
        self._take_in(pieces)

    def close(self) -> None:
        """Nothing is added any more, and no epoch begun."""
        self.closed = True
        self._last = self.epoch + 1

    def holders(self) -> Counter[Hashable]:
        """How many pieces each holds."""
        return Counter(handed.holder for handed in self._held.values())

    @property
    def pristine(self) -> bool:
        """Whether nothing was handed out, added or closed since it was made."""
        changed = self._count != self._given or self.closed == self.terms.stream
        return not changed and not any(each.delivered for each in self._epochs.values())

    @classmethod
    def again(cls, name: str, facts: ReaderFacts, pieces: list[Content]) -> ReaderState:
        """One as that was made of which this was noted; raises as making one."""
        terms = Terms(*facts.terms)
        made = cls(name, [] if terms.stream else pieces, terms)
        if terms.stream:
            # Of those that it was made of, some may be gone.
            made._given, made._digest, made._count = facts.given, facts.digest, facts.given
        return made

    def noted(self) -> Noted:
        """All that it is: what is in somebody's hands counts as come back."""
        held = [(h.epoch, h.place, h.number, h.attempt) for h in self._held.values()]
        t = self.terms
        facts = ReaderFacts(
            terms=(t.epochs, t.shuffle, t.seed, t.lease, t.stream),
            given=self._given,
            digest=self._digest,
            closed=self.closed,
            epoch=self.epoch,
            last=self._last,
            count=self._count,
            place=self._place,
            fresh=list(self._fresh) if t.stream else [],
            numbers=list(self._content),
            returned=[*self._returned, *held],
            epochs={
                n: (each.pieces, each.delivered, each.redelivered, each.done)
                for n, each in self._epochs.items()
            },
        )
        contents = list(self._content.values())
        return Noted(facts, lambda: _runs(contents), self.nbytes)

    def revive(self, facts: ReaderFacts, pieces: list[Content]) -> None:
        """Be what was noted of one with this definition.

        Raises:
            ValueError: no reader can have been so.
        """
        content = dict(zip(facts.numbers, pieces, strict=True))
        known = {*facts.fresh, *(number for _, _, number, _ in facts.returned)}
        epochs = {each[0] for each in facts.returned} | {facts.epoch}
        if not known <= content.keys() or not epochs <= facts.epochs.keys():
            raise ValueError("it hands out what it does not have")
        self._content, self.nbytes = content, sum(map(_size, pieces))
        if not self.terms.stream:
            self._begin(facts.epoch)
            collections.deque(itertools.islice(self._fresh, facts.place), 0)
        else:
            self._fresh = deque(facts.fresh)
        self._count, self._place, self._last = facts.count, facts.place, facts.last
        self._left = len(facts.fresh) if self.terms.stream else facts.count - facts.place
        self.closed, self.epoch = facts.closed, facts.epoch
        self._epochs = {n: EpochCounters(*counted) for n, counted in facts.epochs.items()}
        self._returned = list(facts.returned)
        heapq.heapify(self._returned)

    def stats(self) -> dict[str, Any]:
        """The counters, as plain data."""
        return {
            "pieces": self._count,
            "epoch": self.epoch,
            "closed": self.closed,
            "held": len(self._held),
            "epochs": {epoch: self._counted(epoch) for epoch in sorted(self._epochs)},
        }

    def _counted(self, epoch: int) -> dict[str, int]:
        found = self._epochs[epoch]
        held = sum(handed.epoch == epoch for handed in self._held.values())
        waiting = sum(back[0] == epoch for back in self._returned)
        return {
            "pieces": found.pieces,
            "delivered": found.delivered,
            "redelivered": found.redelivered,
            "done": found.done,
            "held": held,
            "waiting": waiting + (self._left if epoch == self.epoch else 0),
        }

    def _goes_on(self) -> bool:
        return self._count > 0 and (self._last is None or self.epoch + 1 < self._last)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._place, self._left = epoch, 0, self._count
        order = shuffled(self._count, f"{self.terms.seed} {epoch}")
        self._fresh = order if self.terms.shuffle else iter(range(self._count))
        self._epochs[epoch] = EpochCounters(self._count)

    def _hand(self, holder: Hashable, epoch: int, place: int, number: int, attempt: int) -> Handed:
        self._deliveries += 1
        counters = self._epochs[epoch]
        counters.delivered += 1
        counters.redelivered += attempt > 1
        handed = Handed(self._deliveries, holder, epoch, place, number, attempt)
        self._held[handed.delivery] = handed
        return handed

    def _forget(self) -> None:
        """Drop the counters of old epochs that are over."""
        for epoch, found in list(self._epochs.items()):
            if len(self._epochs) <= EPOCHS:
                return
            if found.done == found.pieces and epoch != self.epoch:
                del self._epochs[epoch]

    def _check(self, pieces: list[Content]) -> None:
        terms = self.terms
        if terms.stream and (terms.epochs != 1 or terms.shuffle):
            raise SchemaError(
                f"reader '{self.name}': a stream has one epoch and an order of its own, not"
                f" epochs={terms.epochs}, shuffle={terms.shuffle}"
            )
        if terms.lease is not None and not (terms.lease > 0 and math.isfinite(terms.lease)):
            raise SchemaError(f"reader '{self.name}': lease is seconds > 0, not {terms.lease}")
        if terms.epochs is None and not pieces:
            raise SchemaError(f"reader '{self.name}': no pieces, and that without an end")
        count = len(self._content) + len(pieces)
        size = self.nbytes + sum(map(_size, pieces))
        if count > PIECES or size > BYTES:
            raise SchemaError(
                f"reader '{self.name}': it would hold {count} pieces of {size} bytes, {PIECES} of"
                f" {BYTES} are allowed: hand out ranges of them, or names of files"
            )

    def _take_in(self, pieces: list[Content]) -> None:
        self._content.update(enumerate(pieces, self._count))
        self.nbytes += sum(map(_size, pieces))
        if isinstance(self._fresh, deque):
            self._fresh.extend(range(self._count, self._count + len(pieces)))
            self._left += len(pieces)
            self._epochs[0].pieces += len(pieces)
        self._count += len(pieces)


def shuffled(count: int, seed: str) -> Iterator[int]:
    """The numbers below `count` in an order that depends on `seed` alone, each when asked for.

    Fisher and Yates's, of which only what has moved is kept: no long list is shuffled at once.
    """
    draw = random.Random(seed).random
    moved: dict[int, int] = {}
    for place in range(count):
        other = place + int(draw() * (count - place))
        here = moved.pop(place, place)
        if other == place:
            yield here
        else:
            yield moved.get(other, other)
            moved[other] = here


def _runs(contents: list[Content]) -> list[Piece]:
    """Pieces of one layout that follow each other, as one each."""
    made = []
    for layout, alike in itertools.groupby(contents, key=lambda content: content[0]):
        rows = [values for _, values in alike]
        for start in range(0, len(rows), RUN):
            some = rows[start : start + RUN]
            columns = [list(column) for column in zip(*some, strict=True)]
            made.append(Piece(RunHead(layout, len(some), columns), None, None))
    return made


def _size(piece: Content) -> int:
    layout, values = piece
    texts = sum(len(value) for value in values if isinstance(value, (str, bytes)))
    return len(layout) + 8 * len(values) + texts
