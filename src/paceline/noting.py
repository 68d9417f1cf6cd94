"""What servers took note of, as a checkpoint has it; and what a checkpoint has, on its way back."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from paceline.checkpoints import Checkpoint, Contents, Saved, Thing
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.core import spreading
from paceline.core.errors import TimedOut
from paceline.core.facts import (
    AccumulatorFacts,
    CollectionFacts,
    CounterFacts,
    Facts,
    PartFacts,
    VariableFacts,
    decoded,
    encoded,
)
from paceline.core.manifest import CounterEntry, ThingEntry
from paceline.core.names import label, parts
from paceline.core.versions import epoch_of, moved
from paceline.cuts import Cut, Entry, Found
from paceline.lines import Lines
from paceline.packing import pack, view
from paceline.transports.base import Block

BATCH_BYTES = 1 << 25
BATCH_PIECES = 1024
"""What one step brings at most, or one piece."""

COLLECTION = "collection"
"""A kind of which nothing is there, once it was brought, before somebody opens it again."""

OWN_PLACES = ("variable", "part", "counter")
"""Kinds that a checkpoint has in places of their own, and not among things."""


def contents(lines: Lines, taken: Cut) -> dict[str, Contents]:
    """What a cut has, by container; variables and things are fetched when their turn comes."""
    there: dict[str, list[Entry]] = {}
    for each in _opened_once(lines, taken.entries):
        there.setdefault(parts(each.key).container, []).append(each)
    return {
        name: Contents(
            Variables(lines, taken, entries), counters(taken, entries), things(taken, entries)
        )
        for name, entries in sorted(there.items())
    }


def _opened_once(lines: Lines, entries: list[Entry]) -> list[Entry]:
    """Each collection where it is at home, without what waits for it on another server.

    That is there if another variable stamps it now than the one that did when it was saved.
    """
    found = [each for each in entries if each.kind == COLLECTION]
    there = {each.key: each for each in found}
    if len(there) < len(found):
        homes = lines.first.call(m.Resources()).content["homes"]
        for each in found:
            if homes.get(f"{COLLECTION} {label(each.key)}") == lines.task(each.line):
                there[each.key] = each
    return [each for each in entries if each.kind != COLLECTION or there[each.key] is each]


class Variables(Mapping[str, Saved]):
    """The variables of a container in a cut, each fetched when it is asked for."""

    def __init__(self, lines: Lines, taken: Cut, entries: Iterable[Entry]) -> None:
        self._lines = lines
        self._cut = taken
        there = list(entries)
        self._homes = {parts(each.key).name: each for each in there if each.kind == "variable"}
        self._parts = {(id(each.line), each.key): each for each in there if each.kind == "part"}

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __len__(self) -> int:
        return len(self._homes)

    def __getitem__(self, name: str) -> Saved:
        entry = self._homes[name]
        found = self._cut.fetch(entry)
        facts = decoded(VariableFacts, found.facts)
        shares = dict(zip((head.version for head in found.heads), _trees(found), strict=True))
        trees = shares
        if facts.spread is not None:
            stages = {head.version: s for head, s in zip(found.heads, found.about, strict=True)}
            others = self._others(entry, facts.spread)
            trees = {
                version: spreading.joined(
                    facts.spread, [share, *self._at(name, others, stages[version])]
                )
                for version, share in shares.items()
            }
        current = trees.pop(facts.current)
        spread = facts.spread is not None
        return Saved(facts.current, current, facts.bound, spread, facts.tags, trees)

    def _others(self, home: Entry, spread: m.Spreading) -> dict[str, dict[int, Any]]:
        """The shares that the others have, by their task and stage."""
        made: dict[str, dict[int, Any]] = {}
        tasks = [task for task, _ in spread.parts[1:]]
        for task, line in self._lines.now(tasks).items():
            part = self._parts.get((id(line), home.key))
            if part is None:
                made[task] = {}
                continue
            found = self._cut.fetch(part)
            stages = decoded(PartFacts, found.facts).stages
            made[task] = dict(zip(stages, _trees(found), strict=True))
        return made

    def _at(self, name: str, others: Mapping[str, Mapping[int, Any]], stage: int) -> list[Any]:
        lost = [task for task, shares in others.items() if stage not in shares]
        if lost:
            raise TimedOut(
                f"save '{name}': {' and '.join(lost)} lost the part that it has of it; the next"
                " assign ends that"
            )
        return [shares[stage] for shares in others.values()]


def counters(taken: Cut, entries: Iterable[Entry]) -> dict[str, CounterEntry]:
    """The counters among what was noted."""
    made = {}
    for each in entries:
        if each.kind == "counter":
            facts = decoded(CounterFacts, taken.fetch(each).facts)
            made[parts(each.key).name] = CounterEntry(facts.start, facts.value)
    return made


def things(taken: Cut, entries: Iterable[Entry]) -> Iterator[Thing]:
    """What else there is, each fetched when its turn comes."""
    for each in entries:
        if each.kind not in OWN_PLACES:
            found = taken.fetch(each)
            blocks = [None if memory is None else memory.array() for memory in found.memories]
            name = parts(each.key).name
            near = None
            if each.kind == "accumulator":
                near = decoded(AccumulatorFacts, found.facts).variable
            yield Thing(each.kind, name, found.facts, found.heads, found.about, blocks, near)


def _trees(found: Found) -> list[Any]:
    return [
        view(head.layout, [column[0] for column in head.columns], memory)
        for head, memory in zip(found.heads, found.memories, strict=True)
    ]


class Bringing:
    """Brings back, in a new epoch, what a checkpoint has.

    Versions of the epochs in which its variables were go on counting in the new one: so what has
    stamps, and what these are of, are as far apart as they were.
    """

    def __init__(self, found: Checkpoint, epoch: int) -> None:
        self._found = found
        self._epoch = epoch
        self._known = found.manifest.epochs
        self._lines: dict[int, Connection] = {}
        self._variables: set[str] = set()

    def variable(self, container: str, name: str, key: str, line: Connection) -> None:
        """Bring a variable of that container in the checkpoint, with the versions that have tags.

        What is brought goes to the end of a line, under a key.
        """
        entry = self._found.manifest.of(container).variables[name]
        current = moved(entry.version, self._epoch)
        tags = {tag: self._moved_with(entry.epoch, version) for tag, version in entry.tags.items()}
        facts = VariableFacts(entry.bound, current, tags)
        for version in (*(each.version for each in entry.kept), entry.version):
            tree = self._found.read(name, version, container=container)
            with line.interrupts:
                head, block = pack(line.arena, tree, f"restore '{name}'")
                run = m.RunHead(
                    head.layout,
                    1,
                    [[value] for value in head.values],
                    self._moved_with(entry.epoch, version),
                )
                self._send(line, m.Bring("variable", key, encoded(facts), [run], [0]), [block])

    def counter(self, entry: CounterEntry, key: str, line: Connection) -> None:
        """Bring a counter."""
        self._facts(line, "counter", key, CounterFacts(entry.start, entry.value))

    def thing(self, entry: ThingEntry, key: str, line: Connection, *, whole: bool) -> None:
        """Bring anything else; of an accumulator not its gradients, unless all was saved `whole`.

        They may have been taken since, so they are dropped, and count as of an older epoch.
        """
        thing = self._found.thing(entry)
        if thing.kind == "accumulator":
            facts = decoded(AccumulatorFacts, thing.facts)
            if facts.taken_at is not None:
                facts = structs.replace(facts, taken_at=self._stamp(facts.taken_at))
            if not whole:
                dropped = Counter(facts.dropped) + Counter(epoch=len(thing.heads))
                facts = structs.replace(facts, dropped=dict(dropped), taken_at=None)
                thing = dataclasses.replace(thing, heads=[], about=[], blocks=[])
            thing = dataclasses.replace(thing, facts=encoded(facts))
        heads = [self._stamped(head) for head in thing.heads]
        self._bring(dataclasses.replace(thing, heads=heads), key, line)

    def _bring(self, thing: Thing, key: str, line: Connection) -> None:
        if not thing.heads:
            self._send(line, m.Bring(thing.kind, key, thing.facts, [], []), [])
        for some in _batches(thing):
            heads = [thing.heads[n] for n in some]
            about = [thing.about[n] for n in some]
            with line.interrupts:
                blocks = [_copied(line, thing.blocks[n]) for n in some]
                self._send(line, m.Bring(thing.kind, key, thing.facts, heads, about), blocks)

    def collection(self, thing: Thing, key: str, variable: str | None, line: Connection) -> None:
        """Bring what a collection had on its way; `variable` is the key of what stamps it now.

        Stamps of a variable that was not brought by this, and so does not go on where it was, say
        nothing any more.
        """
        facts = decoded(CollectionFacts, thing.facts)
        if facts.variable is not None:
            heads = [_unstamped(head) for head in thing.heads]
            if variable in self._variables:
                name, container, _ = parts(facts.variable)
                epoch = self._found.manifest.of(container).variables[name].epoch
                heads = [
                    structs.replace(head, version=self._moved_with(epoch, head.version))
                    for head in thing.heads
                ]
            facts = structs.replace(facts, variable=variable)
            thing = dataclasses.replace(thing, facts=encoded(facts), heads=heads)
        self._bring(thing, key, line)

    def revive(self) -> dict[tuple[str, str], str]:
        """Let all that was brought be there, on each server in one step; why something is not."""
        why = {}
        for line in self._lines.values():
            for kind, key, reason in line.call(m.Revive([])).content:
                why[kind, parts(key).name] = reason
                if kind == "variable" and not reason:
                    self._variables.add(key)
        self._lines.clear()
        return {thing: reason for thing, reason in why.items() if reason}

    def _facts(self, line: Connection, kind: str, key: str, facts: Facts) -> None:
        self._send(line, m.Bring(kind, key, encoded(facts), [], []), [])

    def _send(self, line: Connection, request: m.Bring, blocks: Sequence[Block | None]) -> None:
        self._lines[id(line)] = line
        line.call(request, blocks)

    def _moved_with(self, epoch: int, version: int) -> int:
        """Where a version is now of a variable that was in that epoch."""
        return moved(version, self._epoch) if epoch_of(version) == epoch else version

    def _stamped(self, head: m.RunHead) -> m.RunHead:
        return structs.replace(head, version=self._stamp(head.version))

    def _stamp(self, version: int) -> int:
        """Where a version is now of a variable that is not known."""
        known = version != m.NO_VERSION and epoch_of(version) in self._known
        return moved(version, self._epoch) if known else version


def _unstamped(head: m.RunHead) -> m.RunHead:
    return structs.replace(head, version=m.NO_VERSION)


def _batches(thing: Thing) -> Iterator[list[int]]:
    """The places of its pieces, in order, as many together as one step brings."""
    some: list[int] = []
    nbytes = 0
    for n, (head, block) in enumerate(zip(thing.heads, thing.blocks, strict=True)):
        size = len(m.encode(head)) + (0 if block is None else block.nbytes)
        if some and (nbytes + size > BATCH_BYTES or len(some) == BATCH_PIECES):
            yield some
            some, nbytes = [], 0
        some.append(n)
        nbytes += size
    if some:
        yield some


def _copied(line: Connection, content: Any) -> Block | None:
    if content is None:
        return None
    block = line.arena.allocate(content.nbytes)
    np.copyto(np.frombuffer(block.view(), np.uint8), content)
    return block
