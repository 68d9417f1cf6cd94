"""The works that the tasks of one program have a part in, in the program's order.

All tasks run the same program, so the n-th work is the same for all of them: the chief begins and
ends it, and each of the others finds it by its number and says what it is by its own account. A
chief that is started again begins with the first; a work that goes on, and is the same, is taken
over. One that is over cannot be done again by those who have passed it: then it is another *life*
of the program, and they hear so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.errors import Closed, Refused, SchemaError, TaskFailed
from paceline.core.waiting import NOT_YET, NotYet, Stored

KNOWN = 64
"""Works whose names are known; older ones are over, whatever they were."""

ANY_LIFE = 0


@dataclass
class Part:
    """What a task has done of a work: how often it began, and how its function ended."""

    starts: int = 0
    ended: bool = False
    error: str = ""
    result: Stored | None = None


@dataclass
class _Work:
    what: str
    collection: str
    over: bool = False
    parts: dict[str, Part] = field(default_factory=dict)


class ProgramState:
    """The works of a program so far, numbered from 1.

    Attributes:
        life: how often it began anew, from 1.
        holder: who leads it now.
    """

    def __init__(self) -> None:
        self.life = 1
        self.holder: object | None = None
        self._begun = 0
        self._works: dict[int, _Work] = {}

    def begin(
        self, holder: object, number: int, what: str, collection: str
    ) -> tuple[int, list[str]]:
        """The leader begins a work, which may be that of a collection, or takes it over.

        Returns the life that it is in, and the collections of an earlier life that nobody ended.

        Raises:
            Refused: another one leads.
            SchemaError: it is not the next one.
        """
        if self.holder not in (None, holder):
            raise Refused(f"{what}: another session leads this program")
        if self.holder is None:
            self.holder, self._begun = holder, 0
        if number != self._begun + 1:
            raise SchemaError(f"{what}: it is number {number}, after number {self._begun}")
        left: list[str] = []
        last = max(self._works, default=0)
        found = self._works.get(number)
        if number <= last and (found is None or found.over or found.what != what):
            left = self._begin_anew(number, collection)
        self._works.setdefault(number, _Work(what, collection))
        self._works.pop(number - KNOWN, None)
        self._begun = number
        return self.life, left

    def _begin_anew(self, number: int, collection: str) -> list[str]:
        """Forget the works from that number on."""
        gone = [work for at, work in self._works.items() if at >= number]
        self._works = {at: work for at, work in self._works.items() if at < number}
        self.life += 1
        going = [work.collection for work in gone if work.collection and not work.over]
        return [name for name in going if name != collection]

    def end(self, number: int) -> None:
        """The leader has ended a work. Of one that there is not, nothing happens."""
        if number in self._works:
            self._works[number].over = True
            self._works[number].parts.clear()

    def take_part(
        self, task: str, number: int, what: str, life: int, *, until_over: bool
    ) -> tuple[int, bool, int] | NotYet:
        """The life, whether the work is over, and the how-manieth time `task` begins it.

        The last is 0 if it has nothing to begin, because the work is over or its own part has
        ended. The answer comes once the work has begun; with `until_over` once it is over. `life`
        is what `task` was told before; `ANY_LIFE` if it was not.

        Raises:
            Closed: the program has begun anew since.
            SchemaError: the chief's work of that number is another one.
        """
        if life not in (ANY_LIFE, self.life):
            raise Closed(
                f"the chief that {task} worked for died, and another one has begun with the"
                f" program's first call: start {task} again, too"
            )
        if number > max(self._works, default=0):
            return NOT_YET
        work = self._works.get(number)
        if work is None:
            return self.life, True, 0
        if work.what != what:
            raise SchemaError(
                f"work {number} of this program is {what} in {task} and {work.what} in the chief:"
                " all tasks run the same program, with the same calls in the same order"
            )
        if work.over:
            return self.life, True, 0
        if until_over:
            return NOT_YET
        part = work.parts.setdefault(task, Part())
        if part.ended:
            return self.life, False, 0
        part.starts += 1
        return self.life, False, part.starts

    def end_part(
        self, task: str, number: int, life: int, error: str, result: Stored | None
    ) -> None:
        """The function of `task` has ended, with an error or what it returned.

        Nobody asks for that once the work is over.
        """
        work = self._works.get(number)
        if work is None or work.over or life != self.life:
            return
        part = work.parts.setdefault(task, Part())
        part.ended, part.error, part.result = True, error, result

    def result(self, number: int, task: str) -> Part | NotYet:
        """The part that `task` has ended.

        Raises:
            SchemaError: there is no such work, or it is over.
            TaskFailed: the function of some task has ended with an error.
        """
        work = self._works.get(number)
        if work is None or work.over:
            raise SchemaError(f"work {number} does not go on")
        for name, each in work.parts.items():
            if each.error:
                raise TaskFailed(f"{work.what} failed in {name}:\n{each.error}")
        part = work.parts.get(task)
        return part if part is not None and part.ended else NOT_YET

    def lost(self, peer: object) -> None:
        """A session is gone; if it led, another may take over what goes on."""
        if peer is self.holder:
            self.holder = None

    def stats(self) -> dict[str, object]:
        """What goes on, and whose part in it has ended, as plain data."""
        going = {
            work.what: [name for name, part in work.parts.items() if part.ended]
            for work in self._works.values()
            if not work.over
        }
        return {"begun": max(self._works, default=0), "going": going, "life": self.life}
