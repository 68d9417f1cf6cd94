"""Lockstep: a batch is a round, and everybody's turn in it is fixed.

A round begins when the trainer asks for its batch. Item `j` of batch `b` is made by worker

    (b * batch_size + j) mod N

of `N`, so whoever is faster, the same items come in the same order. What workers read while they
make them is the variables' state at the moment of asking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from paceline.core.errors import Closed, ProtocolError
from paceline.core.queue_items import Run
from paceline.core.queue_state import QueueState
from paceline.core.round import Round
from paceline.core.schedule import Schedule
from paceline.core.waiting import NOT_YET, NotYet


@final
class LockstepState(Schedule):
    """A collection in lockstep.

    `turns` are the names of its workers in the order of their turns, and `name_of` finds that of
    whoever offers items.
    """

    kind = "lockstep"
    round: Round

    def __init__(
        self,
        queue: QueueState,
        batch_size: int,
        turns: list[str],
        current: Callable[[], int] | None,
        going: Round,
        *,
        name_of: Callable[[object], str],
    ) -> None:
        super().__init__(queue, batch_size, current)
        self.round = going
        self._turns = turns
        self._places = {name: place for place, name in enumerate(turns)}
        self._name_of = name_of
        self._rounds = 0
        self._made = [0] * len(turns)
        self._returned: set[int] = set()

    @property
    def depth(self) -> int:
        """Nobody starts before the trainer asks."""
        return 0

    @property
    def owing(self) -> list[str]:
        return [name for place, name in enumerate(self._turns) if self._due(place)]

    def offer(self, worker: object, runs: list[Run], abandoned: int) -> None:
        place = self._place(worker)
        # In the batch others' items come between those of a run.
        items = [item for run in runs for item in _single(run)]
        super().offer(worker, items, abandoned)
        for item in items:
            item.number = self._made[place] * len(self._turns) + place
            self._made[place] += 1
        if not self._going or self.queue.closed:
            self.round.end()

    def next(self, *, retry: bool) -> tuple[list[Run], list[int]] | NotYet:
        """The items of the next round, by their numbers, and their lags.

        A round goes on until its batch has been handed over, however often it is asked for.
        """
        self.trainer_waits = False
        if self.queue.closed:
            self._drop_rest()
            raise self.ended()
        if self.queue.size < self.batch_size:
            if not self._going:
                self._begin()
            self._check_hope()
            self.trainer_waits = True
            return NOT_YET
        items = self.queue.dequeue(self.batch_size, self.batch_size)
        assert items is not NOT_YET
        items.sort(key=lambda item: item.number)
        return items, self._lags(items)

    def drain(self, peer: object) -> None:
        place = self._places.get(self._name_of(peer))
        # The trainer, too, says when all have returned; each of them has said so itself.
        if place is not None:
            self._returned.add(place)

    def end(self) -> None:
        super().end()
        self.round.end()

    @property
    def _going(self) -> bool:
        """Whether items of the newest round are still to come."""
        return sum(self._made) < self._rounds * self.batch_size

    def _begin(self) -> None:
        self._rounds += 1
        self.finished = self._handed_over
        self.round.begin()

    def _room(self, worker: object) -> int:
        return self._due(self._place(worker)) - self._outstanding.get(worker, 0)

    def _due(self, place: int) -> int:
        """How many items the worker at `place` has still to hand in for the rounds so far."""
        workers = len(self._turns)
        turns = (self._rounds * self.batch_size - place + workers - 1) // workers
        return max(0, turns) - self._made[place]

    def _place(self, worker: object) -> int:
        name = self._name_of(worker)
        if name not in self._places:
            raise ProtocolError(
                f"offer to collection '{self.queue.name}' by {name}: in lockstep its items are made"
                f" by {self._turns}"
            )
        return self._places[name]

    def _check_hope(self) -> None:
        gone = [place for place in self._returned if self._due(place)]
        if not gone:
            return
        workers = len(self._turns)
        number = min(self._made[place] * workers + place for place in gone)
        batch, item = divmod(number, self.batch_size)
        raise Closed(
            f"collection '{self.queue.name}': the function of {self._turns[number % workers]} has"
            f" returned, and in lockstep item {item} of batch {batch} is its turn: such a run goes"
            " on with all its workers or ends"
        )


def _single(run: Run) -> list[Run]:
    """The items of a run, each as a run of its own."""
    items = []
    while run.count > 1:
        first, run = run.split(1)
        items.append(first)
    return [*items, run]
