"""How the lines of one session behave: the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from paceline.core.account import Account


@dataclass(slots=True)
class Conduct:
    """What holds for every line of a session.

    Attributes:
        account: where the time of waits goes, of those on the account's own thread.
        on_read: hears of each version that is read, with the variable's key.
        before_wait: called before each request that a server may keep waiting.
        worked_off: whether a reader has told this session that there is no more to do.
        in_lockstep: whether a server may answer reads with other versions than the current ones.
    """

    account: Account | None = None
    on_read: Callable[[str, int], None] | None = None
    before_wait: Callable[[], None] | None = None
    worked_off: bool = False
    in_lockstep: bool = False

    def spent_on(self, cause: str) -> AbstractContextManager[None]:
        """Count the time of a block as `cause`, where this thread's time is counted."""
        return nullcontext() if self.account is None else self.account.spent_on(cause)
