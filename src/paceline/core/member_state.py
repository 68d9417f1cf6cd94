"""Who is in the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.errors import Refused


@dataclass(frozen=True, slots=True)
class Member:
    """One session of one process."""

    job: str
    index: int
    pid: int
    session: int

    @property
    def name(self) -> str:
        """Its task, as people write it."""
        return f"{self.job}:{self.index}"


class MemberState:
    """The members, and how many have left or were lost."""

    def __init__(self) -> None:
        self.alive: dict[int, Member] = {}
        self.left = 0
        self.lost: list[Member] = []
        self._sessions = 0

    def join(self, job: str, index: int, pid: int) -> Member:
        """Take in a session; an index below 0 asks for the next free one.

        Raises:
            Refused: a living process holds that task, such as a first chief.
        """
        held = {m.index: m for m in self.alive.values() if m.job == job}
        if index < 0:
            index = next(i for i in range(len(held) + 1) if i not in held)
        elif index in held:
            raise Refused(
                f"task {job}:{index} is held by process {held[index].pid} and alive; process {pid}"
                " cannot have it too"
            )
        self._sessions += 1
        member = Member(job, index, pid, self._sessions)
        self.alive[member.session] = member
        return member

    def leave(self, session: int) -> None:
        """A session says goodbye."""
        if self.alive.pop(session, None) is not None:
            self.left += 1

    def lose(self, session: int) -> Member | None:
        """A session's connection ended without a goodbye."""
        member = self.alive.pop(session, None)
        if member is not None:
            self.lost = [*self.lost[-99:], member]
        return member

    def count(self, job: str) -> int:
        """Living members of a job."""
        return sum(m.job == job for m in self.alive.values())
