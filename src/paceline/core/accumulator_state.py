"""An accumulator: gradients of many, taken as one mean of `n`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Any, NamedTuple

from paceline.core.errors import SchemaError, WorkerLeft
from paceline.core.facts import AccumulatorFacts, Noted, Piece, tree_piece
from paceline.core.messages.replies import NO_VERSION
from paceline.core.tree import check, decoded, dtype_named, paths
from paceline.core.versions import count_of, lag
from paceline.core.waiting import NOT_YET, NotYet, Stored

NAMED = 16
"""How many tasks a message names."""


class Gradient(NamedTuple):
    """One that was accepted, by whom, and the version it was made with."""

    task: str
    version: int | None
    tree: Stored
    of: Hashable


class AccumulatorState:
    """Holds gradients, in the order they came, until the first `n` of them are taken together.

    With a `variable`, lag is counted up to the version that the next step is applied to: the
    variable's current one, `advance` says which; or, between a take and the assign after it, the
    one that this will make. A gradient with more than `max_lag` is dropped, when it comes or when
    it has become so old: `late` if only that take made it too old, `stale` if an assign did,
    `epoch` if it is of another epoch.

    Contributors are those who joined or applied, until they leave; those who left are remembered
    by task until the same task is there again.

    Raises:
        SchemaError: there is a leaf of which no mean is taken.
    """

    def __init__(
        self, name: str, layout: bytes, variable: str | None, max_lag: int | None, capacity: int
    ) -> None:
        check_leaves(layout, f"accumulator '{name}'")
        self.name = name
        self.layout = layout
        self.variable = variable
        self.max_lag = max_lag
        self.capacity = capacity
        self.current = 0
        self.held: list[Gradient] = []
        self.applied = 0
        self.taken = 0
        self.dropped: Counter[str] = Counter()
        self.left: dict[str, None] = {}
        """Tasks that contributed and left, oldest first."""
        self._taken_at: int | None = None
        self._contributors: dict[Hashable, str] = {}

    @property
    def definition(self) -> dict[str, Any]:
        """What it was made with."""
        return {"variable": self.variable, "max_lag": self.max_lag, "capacity": self.capacity}

    @property
    def contributors(self) -> list[str]:
        """The tasks that contribute now."""
        return sorted(self._contributors.values())

    def advance(self, version: int) -> bool:
        """The variable is at that version now; whether room was made."""
        self.current = version
        return self._drop_old()

    def join(self, contributor: Hashable, task: str) -> None:
        """Count on a contributor from now on."""
        self._contributors[contributor] = task
        self.left.pop(task, None)

    def leave(self, contributor: Hashable) -> bool:
        """Count on a contributor no longer, whether it says so or died; whether it was one."""
        task = self._contributors.pop(contributor, None)
        if task is None:
            return False
        if task not in self._contributors.values():
            self.left[task] = None
        return True

    def check(self, layout: bytes, version: int | None) -> None:
        """Check a gradient that is to be applied.

        Raises:
            SchemaError: its structure is another, or its version none that there was.
        """
        what = f"apply '{self.name}'"
        check(layout, self.layout, what)
        if self.variable is None and version is not None:
            raise SchemaError(
                f"{what}: version={version}, but it is linked to no variable: leave the version out"
            )
        if self.variable is not None and version is None:
            raise SchemaError(
                f"{what}: it needs the version of '{self.variable}' that the gradient was made with"
            )
        if version is not None and version > self.current:
            raise SchemaError(
                f"{what}: version {count_of(version)} is newer than '{self.variable}', which is at"
                f" {count_of(self.current)}"
            )

    def apply(self, contributor: Hashable, tree: Stored, version: int | None) -> bool | NotYet:
        """Take a gradient in, or drop it; whether it was accepted. Not while it holds enough."""
        reason = self._too_old(version)
        if reason is None and len(self.held) >= self.capacity:
            return NOT_YET
        self.applied += 1
        if reason is None:
            task = self._contributors[contributor]
            self.held.append(Gradient(task, version, tree, contributor))
            return True
        self.dropped[reason] += 1
        return False

    def ready(self, n: int, on_leave: str = "raise") -> int | NotYet:
        """How many a take would give now: `n`, or with `"lower"` what those who are left can give.

        Raises:
            WorkerLeft: contributors left, and the others cannot make `n`; with `"lower"`, nobody is
                left. Never with `"wait"`.
        """
        if len(self.held) >= n:
            return n
        possible = self._possible()
        if not self.left or possible >= n or on_leave == "wait":
            return NOT_YET
        if on_leave == "lower" and possible:
            return possible if len(self.held) == possible else NOT_YET
        left = list(self.left)
        raise WorkerLeft(
            f"take({n}) of '{self.name}': {_some(left)} left; {len(self.held)} accepted, and"
            f" contributors are {_some(self.contributors)}: not enough for {n}"
        )

    def take(self, n: int) -> list[Gradient]:
        """Take the first `n`; of the others those go which their step has passed by."""
        found, self.held = self.held[:n], self.held[n:]
        self.taken += n
        self._taken_at = self.current
        self._drop_old()
        return found

    def lag(self, version: int | None) -> int:
        """How far the current version is ahead of that one."""
        return 0 if version is None else lag(self.current, version) or 0

    def missing(self, n: int) -> str:
        """What a take of `n` waits for, as part of a message."""
        from_whom = f" ({_some([each.task for each in self.held])})" if self.held else ""
        text = f"{len(self.held)} accepted{from_whom}, {n - len(self.held)} missing"
        if self.left:
            text += f"; left: {_some(list(self.left))}"
        text += f"; contributors: {_some(self.contributors)}"
        if self.variable is None:
            return f"{text}; whoever applies one ends the wait"
        if self.max_lag == 0 and self._taken_at == self.current:
            return (
                f"{text}; the step of version {count_of(self.current)} of '{self.variable}' was"
                " taken, the next assign lets others come"
            )
        return f"{text}; whoever applies one of version {count_of(self.current)} ends the wait"

    @property
    def pristine(self) -> bool:
        """Whether nothing was applied yet."""
        return not self.applied

    def noted(self) -> Noted:
        """All that it is, but for its contributors, who are to come again."""
        held = list(self.held)

        def pieces() -> list[Piece]:
            made = []
            for each in held:
                version = NO_VERSION if each.version is None else each.version
                made.append(tree_piece(each.tree, version, each.task))
            return made

        facts = AccumulatorFacts(
            self.layout, self.variable, self.max_lag, self.capacity,
            self.applied, self.taken, dict(self.dropped), self._taken_at,
        )  # fmt: skip
        return Noted(facts, pieces, sum(each.tree.nbytes for each in held))

    def revive(self, facts: AccumulatorFacts, held: list[Gradient]) -> None:
        """Be what was noted of one with this definition; `advance` drops what is too old by now.

        Raises:
            SchemaError: a gradient has another structure.
            ValueError: no accumulator can have been so.
        """
        for each in held:
            check(each.tree.layout, self.layout, f"restore '{self.name}'")
        dropped = sum(facts.dropped.values())
        if len(held) > self.capacity or facts.applied != facts.taken + dropped + len(held):
            raise ValueError("its counters are not those of what it held")
        self.held, self.applied, self.taken = held, facts.applied, facts.taken
        self.dropped, self._taken_at = Counter(facts.dropped), facts.taken_at

    def stats(self) -> dict[str, Any]:
        """Its counters: applied = taken + dropped (by reason) + held, always."""
        return {
            "applied": self.applied,
            "taken": self.taken,
            "dropped": dict(self.dropped),
            "held": len(self.held),
            "contributors": self.contributors,
            "left": list(self.left),
        }

    def _possible(self) -> int:
        """How many there will be if all who have none in it give one more."""
        gave = {each.of for each in self.held}
        return len(self.held) + sum(one not in gave for one in self._contributors)

    def _too_old(self, version: int | None) -> str | None:
        """Why a gradient of that version is to be dropped."""
        if version is None:
            return None
        behind = lag(self.current, version)
        if behind is None:
            return "epoch"
        if self.max_lag is None:
            return None
        if behind > self.max_lag:
            return "stale"
        passed = self._taken_at == self.current
        return "late" if passed and behind + 1 > self.max_lag else None

    def _drop_old(self) -> bool:
        before, self.held = self.held, []
        for each in before:
            reason = self._too_old(each.version)
            if reason is None:
                self.held.append(each)
            else:
                self.dropped[reason] += 1
        return len(self.held) < len(before)


def check_leaves(layout: bytes, what: str) -> None:
    """Check that a mean can be taken of each leaf: of floats, and arrays of floats or complexes.

    Raises:
        SchemaError: of one it cannot; the message starts with `what` and names it.
    """
    for path, leaf in zip(paths(layout), decoded(layout).leaves, strict=True):
        plain = leaf.shape is None
        if leaf.kind != "float" if plain else dtype_named(leaf.kind).kind not in "fc":
            raise SchemaError(
                f"{what}: leaf {path} is {leaf}, of which no mean is taken; give like= a tree of"
                " floats, such as the gradients themselves"
            )


def _some(tasks: list[str]) -> str:
    more = f" and {len(tasks) - NAMED} more" if tasks[NAMED:] else ""
    return (", ".join(tasks[:NAMED]) or "nobody") + more
