"""A server without sockets, and peers that ask it for anything in any order.

Whatever they do, nothing but what the protocol allows may come of it: each request has one answer,
no answer tells of an error that is none of ours, and when all have gone nothing is left of them.
"""

from __future__ import annotations

import gc
from random import Random
from typing import Any

from samples import Maker, numbers_in

from paceline.core import messages as m
from paceline.core.clock import ManualClock
from paceline.core.codec import ERROR, ONE_WAY, REPLY, REQUEST
from paceline.core.errors import ProtocolError
from paceline.server.cut_desk import LIMIT
from paceline.server.lines import Peer
from paceline.server.loop import DESKS
from paceline.server.operation_desk import OperationDesk
from paceline.server.part_desk import HomeDesk
from paceline.server.queue_desk import QueueDesk
from paceline.server.reader_desk import ReaderDesk
from paceline.server.service import Service, at_once
from paceline.server.variable_desk import VariableDesk
from paceline.transports.base import Channel, Frame, HeapArena, Inline

EPOCH = 7
UNANSWERED = (m.Cancel, m.Receipt, m.Delivered)
"""What is sent one way, and has no answer of its own."""


class Inbox(Channel):
    """Keeps what a peer is sent, and lets go of its memory at once."""

    def __init__(self, *, shares_memory: bool) -> None:
        self.shares_memory = shares_memory
        self.frames: list[Frame] = []

    def send(self, frame: Frame, due: float | None = None) -> None:
        frame.buffers = ()
        self.frames.append(frame)

    def receive(self, timeout: float | None = None) -> Frame | None:
        return None

    def alive(self) -> bool:
        return True

    def flush(self) -> None:
        """Nothing is shared."""

    def close(self) -> None:
        """Nothing is held."""


class Crowd:
    """A server, and peers that come, ask for anything, and go."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.maker = Maker(random)
        self.clock = ManualClock(1.0)
        self.service = Service(HeapArena(), EPOCH, DESKS, clock=self.clock, run_long=self._later)
        self.peers: list[Peer] = []
        self.asked: dict[Peer, set[int]] = {}
        self.numbers = 0
        self.log: list[str] = []
        self._long: list[tuple[Any, Any]] = []

    def step(self) -> None:
        """One thing that may happen."""
        chance = self.random.random()
        if not self.peers or (chance < 0.05 and len(self.peers) < 4):
            self.come()
        elif chance < 0.08:
            self.go(self.random.choice(self.peers))
        elif chance < 0.12:
            self.clock.advance(self.random.choice([0.0, 0.01, 1.0, 100.0]))
            self.service.tick()
            self._catch_up()
        elif chance < 0.2:
            self._do_long()
        else:
            peer = self.random.choice(self.peers)
            request, buffers = self.maker.request()
            self.ask(peer, request, buffers)
        self._hear()

    def come(self) -> None:
        """Another peer, which mostly joins."""
        peer = Peer(Inbox(shares_memory=self.random.random() < 0.5))
        self.peers.append(peer)
        self.asked[peer] = set()
        if self.random.random() < 0.95:
            self.ask(peer, m.Join("worker", -1, 1, b""), [])

    def go(self, peer: Peer) -> None:
        """A peer's connection ends."""
        self.log.append(f"{self._of(peer)} goes")
        self.peers.remove(peer)
        del self.asked[peer]
        self.service.lost(peer)
        self._catch_up()

    def ask(self, peer: Peer, request: Any, buffers: list[bytes]) -> None:
        """A peer sends that."""
        self.numbers += 1
        one_way = isinstance(request, UNANSWERED) or self.random.random() < 0.05
        kind = ONE_WAY if one_way else REQUEST
        number = self.numbers if kind == REQUEST else 0
        self.log.append(f"{self._of(peer)}: {request} with {[len(each) for each in buffers]}")
        if number:
            self.asked[peer].add(number)
        found = [Inline(each) if each else None for each in buffers]
        try:
            self.service.feed(peer, Frame(kind, number, m.encode(request), found))
        except ProtocolError:
            self._heard(peer)
            self.go(peer)
        self._catch_up()

    def _catch_up(self) -> None:
        """What came while the server was frozen is carried out, as its loop does it."""

        def feed(peer: Peer, frame: Frame) -> None:
            try:
                self.service.feed(peer, frame, kept=True)
            except ProtocolError:
                if peer in self.peers:
                    self._heard(peer)
                    self.go(peer)

        self.service.freezing.catch_up(feed, self.service.end)

    def _thaw(self) -> None:
        while self.service.freezing.active:
            self.clock.advance(LIMIT)
            self.service.tick()
            self._catch_up()

    def end(self) -> None:
        """Everybody goes; raises if anything is left of them."""
        self._thaw()
        self._do_long()
        for peer in list(self.peers):
            for number in list(self.asked[peer]):
                self.ask(peer, m.Cancel(number), [])
                if peer not in self.peers:
                    break
        self._thaw()
        self._do_long()
        self._hear()
        for peer, numbers in self.asked.items():
            if not peer.left and peer.member is not None:
                assert not numbers, f"{self._of(peer)} has no answer to {numbers}"
        for peer in list(self.peers):
            self.go(peer)
        self._do_long()
        gc.collect()
        self.service.tick()
        self.clock.advance(1e6)
        self.service.tick()
        self._check_empty()

    def _check_empty(self) -> None:
        service = self.service
        keys: Any = service.parking._by_key
        waiting = [key for key in keys if key[0] != "lease"]
        assert not waiting, f"they wait still: {waiting}"
        variables: VariableDesk = service.desk(VariableDesk)
        assert not variables.reading
        for state in variables.states.values():
            assert not state._adding, f"the write turn of {state.name!r} is nobody's"
            for kept in state.kept.listing():
                # A round of lockstep outlives its workers, as its collection does.
                left = [each for each in kept.holders if isinstance(each, Peer)]
                assert not left, f"{state.name!r} is held by {left}"
        home: HomeDesk = service.desk(HomeDesk)
        assert not home._grants._open
        readers: ReaderDesk = service.desk(ReaderDesk)
        for reader in readers.states.values():
            assert not reader.holders()
        queues: QueueDesk = service.desk(QueueDesk)
        for queue in queues.states.values():
            told = queue.stats()
            assert told["accepted"] == told["delivered"] + told["stored"], told
            assert queue.stored == queue.size >= 0, told
            assert queue.dequeue(queue.size, queue.size) is not None
            assert queue.size == 0
        operations: OperationDesk = service.desk(OperationDesk)
        assert not any(lane.calls for lane in operations._lanes.values())
        service.containers.reset(None, "")
        assert not variables.states
        assert not queues.states

    def _later(self, work: Any, finish: Any) -> None:
        self._long.append((work, finish))

    def _do_long(self) -> None:
        while self._long:
            at_once(*self._long.pop(0))

    def _hear(self) -> None:
        for peer in self.peers:
            self._heard(peer)

    def _heard(self, peer: Peer) -> None:
        assert isinstance(peer.channel, Inbox)
        frames, peer.channel.frames = peer.channel.frames, []
        for frame in frames:
            reply = m.decode_reply(frame.header)
            assert frame.kind in (REPLY, ERROR)
            if frame.kind == ERROR:
                assert reply.code != "PacelineError", f"an error that is none of ours: {reply.text}"
                if frame.request == 0:
                    continue
            assert frame.request in self.asked[peer], f"{reply} answers nothing"
            self.asked[peer].discard(frame.request)
            self.maker.seen = [*self.maker.seen, *numbers_in(reply)][-16:]
            # While a server is frozen, replies to what came before it follow.
            told = isinstance(reply, m.Text) and type(reply.content) is int
            if told and self.log[-1].find("Enter(") > 0:
                self.maker.generation = min(reply.content, 10**18 - 1)

    def _of(self, peer: Peer) -> str:
        return f"peer {id(peer) % 9973}"


def run(random: Random, steps: int) -> None:
    """So many steps, and their end; what went wrong says what was done before."""
    crowd = Crowd(random)
    try:
        for _ in range(steps):
            crowd.step()
        crowd.end()
    except Exception as e:
        raise AssertionError("\n".join([*crowd.log[-30:], f"{type(e).__name__}: {e}"])) from e
