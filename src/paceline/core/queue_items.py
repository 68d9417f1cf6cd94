"""Items as the states keep them: in runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.messages import RunHead


@dataclass(slots=True, eq=False)
class Run:
    """Items of one layout, stamp and producer: `count` of those accepted in one step, in order.

    What is said of all of them and their arrays' memory, unread, is shared by the parts of a run.

    Attributes:
        each: bytes that an item counts, without its texts.
        owner: the session that enqueued them.
        texts: which columns are of texts or bytes.
        number: the first item's place among all that the queue accepted.
        priority: of all its items; a queue of that order hands out the lowest first.
    """

    head: RunHead
    memory: Any
    each: int
    producer: str
    owner: object = None
    texts: tuple[int, ...] = ()
    start: int = 0
    count: int = -1
    number: int = -1
    priority: int = 0

    def __post_init__(self) -> None:
        if self.count < 0:
            self.count = self.head.count

    @property
    def version(self) -> int:
        """The stamp of all its items."""
        return self.head.version

    @property
    def nbytes(self) -> int:
        """Bytes that its items count."""
        if not self.texts:
            return self.count * self.each
        stop = self.start + self.count
        columns = self.head.columns
        texts = sum(sum(map(len, columns[place][self.start : stop])) for place in self.texts)
        return self.count * self.each + texts

    def split(self, count: int) -> tuple[Run, Run]:
        """Its first `count` items, and the rest."""
        return replace(self, count=count), self.part(count, self.count - count)

    def part(self, start: int, count: int) -> Run:
        """`count` of its items, from the one at `start`."""
        return replace(self, start=self.start + start, count=count, number=self.number + start)

    def content(self) -> tuple[RunHead, Any]:
        """What is said of these items, and their memory."""
        head, memory = self.head, self.memory
        if self.count == head.count:
            return head, memory
        stop = self.start + self.count
        if memory is not None:
            row = memory.nbytes // head.count
            memory = memory.part(self.start * row, self.count * row)
        columns = [column[self.start : stop] for column in head.columns]
        metrics = head.metrics[self.start : stop]
        return RunHead(head.layout, self.count, columns, head.version, metrics), memory


def items_in(runs: Iterable[Run]) -> int:
    """How many items."""
    return sum(run.count for run in runs)
