"""A server without its loop: answers every message, does all the waiting.

Whoever drives it feeds frames and calls `tick`; it never blocks, and is never entered twice at
once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, ClassVar

from paceline.core import messages as m
from paceline.core.account import Account, Times
from paceline.core.clock import Clock, SystemClock
from paceline.core.cluster_state import ClusterState
from paceline.core.codec import ERROR, ONE_WAY, REPLY, REQUEST
from paceline.core.errors import Disconnected, PacelineError, ProtocolError, Refused, Unsupported
from paceline.core.facts import Noted
from paceline.core.member_state import Member, MemberState
from paceline.core.names import checked, label
from paceline.core.spec import Task
from paceline.core.waiting import HELD_BACK, NOT_YET
from paceline.server.brought import Maker
from paceline.server.containers import Containers
from paceline.server.containers import Handler as Handler
from paceline.server.freezing import Freezing
from paceline.server.lanes import Finish as Finish
from paceline.server.lanes import Work as Work
from paceline.server.lanes import at_once as at_once
from paceline.server.lanes import here
from paceline.server.lines import Lines, Peer
from paceline.server.parking import Parked, Parking
from paceline.transports.base import Arena, Buffers, Frame

FIRST = (m.Join, m.Rejoin)


class Desk(ABC):
    """All that a server does with one kind of resource.

    `in_containers`: whether the `name` of a request is the key of something in a container.
    """

    in_containers: ClassVar[bool] = True

    @abstractmethod
    def handlers(self) -> dict[type, Handler]:
        """Which requests it answers, and how."""

    @abstractmethod
    def lost(self, peer: Peer) -> None:
        """A connection has ended: what it held goes back."""

    @abstractmethod
    def reset(self, gone: Callable[[str], bool]) -> None:
        """Forget all whose key is gone; nobody waits for it any more."""

    @abstractmethod
    def listing(self) -> tuple[str, dict[str, Any]]:
        """What there is, by name, and the word for it."""

    def noted(self, wanted: Callable[[str], bool]) -> Iterable[tuple[str, str, Noted]]:
        """All of wanted keys as it is now: its kind, its key, and what is noted of it."""
        return ()

    def makers(self) -> dict[str, Maker]:
        """What makes those kinds again."""
        return {}


class Service:
    """Members, the desks, and the requests that wait.

    `run_long` runs work beside the loop, one after the other as given, and reports back on each in
    that order; by default work is done at once. So is what goes `beside` it, on one of so many
    threads of a lane, unless that is set.
    `linger` is for how long a session is kept whose connection broke, where it can make another;
    `moved(new, known)` hears of a session that did: `known` goes on over the channel of `new`.
    """

    def __init__(
        self,
        arena: Arena,
        epoch: int,
        desks: Sequence[Callable[[Service], Desk]],
        *,
        clock: Clock | None = None,
        run_long: Callable[[Work, Finish], None] | None = None,
        linger: float = 0.0,
        moved: Callable[[Peer, Peer], None] = lambda new, known: None,
    ) -> None:
        self.arena, self.epoch = arena, epoch
        self.stopping = False
        self.account: Account | None = None
        """Where the time of whoever drives it goes, if that is a process of its own."""
        self.members = MemberState()
        self.cluster = ClusterState()
        self.came_or_went: Callable[[Peer, str], None] = lambda peer, how: None
        """Hears of each member that has joined, left, or was lost."""
        self.dismiss: Callable[[Peer], None] = self.lost
        """Ends a session whose process is known to have ended."""
        self._peers: dict[Peer, None] = {}
        self.clock = clock or SystemClock()
        self.parking = Parking(self.clock)
        self.containers = Containers(self.parking, self.clock, epoch)
        self.run_long = run_long or at_once
        self.beside = here
        self.lines = Lines(epoch, linger)
        self.freezing = Freezing()
        self._moved = moved
        # What was let go of: finalisers put it here, which run anywhere.
        self.ended: deque[Callable[[], None]] = deque()
        self._handlers = self._own()
        self.desks: list[Desk] = []
        for make in desks:
            desk = make(self)
            self.desks.append(desk)
            handlers = desk.handlers()
            if desk.in_containers:
                handlers = self.containers.guarded(handlers)
                self.containers.on_reset.append(desk.reset)
            self._handlers |= handlers

    def _own(self) -> dict[type, Handler]:
        return {
            m.Join: self._join,
            m.Rejoin: self._rejoin,
            m.Leave: self._leave,
            m.Cancel: self._cancel,
            m.Report: self._report,
            m.Resources: self._resources,
            m.Stats: self._stats,
            m.Stop: self._stop,
        }

    def desk(self, kind: type[Any]) -> Any:
        """The desk of that class, made before the one that asks."""
        return next(desk for desk in self.desks if isinstance(desk, kind))

    # What drives it

    def feed(self, peer: Peer, frame: Frame, *, kept: bool = False) -> None:
        """Take in one frame of a peer, or carry out one that was `kept` while all was frozen.

        Raises:
            ProtocolError: it broke the protocol and is to be cut off; it has been told why.
        """
        if self.ended:
            self._settle()
        try:
            if peer.window is not None and not kept:
                peer.took(frame.received)
            if frame.kind != REQUEST and frame.kind != ONE_WAY:
                raise ProtocolError(f"a client sent a frame of kind {frame.kind}")
            if peer.left:
                return
            peer.requests += 1
            request = m.decode_request(frame.header)
            if peer.member is None and type(request) not in FIRST:
                raise ProtocolError(f"{type(request).__name__} came before Join")
            timeout = getattr(request, "timeout", None)
            if timeout is not None and not timeout >= 0:
                # Before anything is done for it.
                raise ProtocolError(f"a timeout of {timeout} seconds")
            if frame.error is not None:
                raise frame.error
            if self.freezing.active and not kept and self.freezing.keeps(peer, request, frame):
                return
            handler: Handler = self._handlers.get(type(request), _not_here)
            handler(peer, request, frame)
        except ProtocolError as e:
            self.answer(peer, frame.request, e)
            raise
        except PacelineError as e:
            self.answer(peer, frame.request, e)

    def lost(self, peer: Peer) -> None:
        """A peer's connection has ended: nothing it waited for happens, what it held goes back."""
        if not self.freezing.active or not self.freezing.lost(peer):
            self.end(peer)

    def end(self, peer: Peer, failed: str = "") -> None:
        """A session has ended, and all that it asked has been carried out."""
        self.parking.lost(peer)
        # A session that has said goodbye is lost once more when its connection ends.
        first = peer in self._peers
        self._peers.pop(peer, None)
        if peer.member is not None:
            self.members.lose(peer.member.session)
        self.lines.end(peer)
        with ExitStack() as ends:
            # What fails at one desk is left to no other.
            for desk in reversed(self.desks):
                ends.callback(desk.lost, peer)
        if first and peer.member is not None:
            task = Task(peer.member.job, peer.member.index)
            self.cluster.gone(task, goodbye=peer.left, failed=failed)
            left = f"has failed: {failed}" if failed else "has left"
            self.came_or_went(peer, left if peer.left else "was lost")

    def tick(self) -> float | None:
        """End waits whose time is up; seconds until there is more to do, `None` if never."""
        if self.ended:
            self._settle()
        if not self.parking.timed:
            return None
        self.parking.expire()
        return self.parking.next_deadline()

    def catch_up(self, feed: Callable[[Peer, Frame], None]) -> float | None:
        """Give `feed` what was kept while all was frozen; then as `tick`."""
        self.freezing.catch_up(feed, self.end)
        return self.tick()

    # What desks use

    def answer(self, peer: Peer, number: int, result: Any) -> None:
        """Send a reply, a reply with its buffers, or an error; one-way requests get none."""
        buffers: Buffers = ()
        kind = REPLY
        if isinstance(result, Exception):
            kind, result = ERROR, m.failure(result)
        elif type(result) is tuple:
            result, buffers = result
        if number != 0:
            peer.post(Frame(kind, number, m.encode(result), buffers))

    def ask(
        self,
        peer: Peer,
        frame: Frame,
        key: Hashable,
        attempt: Callable[[], Any],
        timeout: float | None,
        what: Callable[[], str],
        *,
        behind: bool = False,
        in_vain: Callable[[], None] | None = None,
        then: Callable[[Any], None] | None = None,
    ) -> None:
        """Answer with what `attempt` says, now or once `key` has changed.

        `behind`: not before those who wait for `key` already, unless each is held back by a bound
        of its own. `in_vain` is called when the wait ends without an answer of `attempt`. `then` is
        given what `attempt` said, and answers.
        """
        number = frame.request

        def finish(result: Any) -> None:
            if in_vain is not None and isinstance(result, Exception):
                in_vain()
            if then is None or isinstance(result, Exception):
                self.answer(peer, number, result)
            else:
                then(result)

        result: Any = self.parking.standing(peer, key) if behind else None
        if result is None:
            result = attempt()
            if result is not NOT_YET and result is not HELD_BACK:
                finish(result)
                return
        parked = Parked(peer, number, what, attempt, finish, self.containers.asked)
        parked.held_back = result is HELD_BACK
        self.parking.park(key, parked, timeout)
        if timeout == 0:
            self.parking.expire()

    def _settle(self) -> None:
        while self.ended:
            self.ended.popleft()()

    def who(self) -> str:
        """The living members, as part of a message."""
        names = sorted(member.name for member in self.members.alive.values())
        return f"members: {', '.join(names[:16])}{', ...' if len(names) > 16 else ''}"

    # Members

    def _join(self, peer: Peer, request: m.Join, frame: Frame) -> None:
        if peer.member is not None:
            raise ProtocolError(f"{peer.name} joined twice")
        known = self.lines.joined_before(request.token)
        if known is not None and known.member is not None:
            self._move(peer, known)
            self._say(peer, frame.request, self._joined(known.member, self.lines.linger))
            return
        if peer.unwanted:
            raise Refused(f"the server takes no more sessions: {peer.unwanted}")
        task = Task(checked(request.job), request.index)
        self.cluster.admit(task, request.cluster, list(request.servers))
        try:
            peer.member = self.members.join(*task, request.pid)
        except Refused as e:
            waited = self.lines.waited_for(*task)
            # Who belongs to a cluster may come back at once, and tries again until it has its task.
            kind = Disconnected if waited and request.cluster is not None else Refused
            raise kind(f"{e}{waited}") from None
        self._peers[peer] = None
        self.cluster.joined(Task(peer.member.job, peer.member.index))
        self.came_or_went(peer, f"is here (process {request.pid})")
        lasts = self.lines.lasts(peer, request.token)
        linger = self.lines.linger if lasts else 0.0
        self._say(peer, frame.request, self._joined(peer.member, linger, request.cluster is None))
        if lasts:
            self.lines.begin(peer, request.token)

    def _joined(self, member: Member, linger: float, new_here: bool = False) -> m.Joined:
        servers = self.cluster.targets() if new_here else []
        run = self.lines.incarnation
        return m.Joined(member.session, member.index, self.epoch, linger, servers, run)

    def _rejoin(self, peer: Peer, request: m.Rejoin, frame: Frame) -> None:
        if peer.member is not None:
            raise ProtocolError(f"{peer.name} joined twice")
        known, missing = self.lines.found(request)
        assert known.window is not None
        self._move(peer, known)
        self._say(peer, frame.request, m.Rejoined(known.window.received))
        for again in missing:
            again.received = known.window.received
            with suppress(Disconnected):
                known.channel.send(again)

    def _move(self, new: Peer, known: Peer) -> None:
        """A session has made another connection; the one it had, if there still is one, ends."""
        self._moved(new, known)
        known.channel, known.lingers = new.channel, False

    def _say(self, peer: Peer, number: int, reply: m.Joined | m.Rejoined) -> None:
        """Answer before anything is counted."""
        if number != 0:
            with suppress(Disconnected):
                peer.channel.send(Frame(REPLY, number, m.encode(reply)))

    def _leave(self, peer: Peer, request: m.Leave, frame: Frame) -> None:
        assert peer.member is not None
        self.members.leave(peer.member.session)
        # Its connection may outlast it, for as long as it looks at what it was lent.
        peer.left = True
        self.end(peer, request.failed)
        self.answer(peer, frame.request, m.Done())

    def peers(self) -> list[Peer]:
        """Those who have joined and are there."""
        return list(self._peers)

    def _cancel(self, peer: Peer, request: m.Cancel, frame: Frame) -> None:
        self.parking.cancel(peer, request.number)

    def _resources(self, peer: Peer, request: m.Resources, frame: Frame) -> None:
        content = self._listings()
        content["shared"] = self.containers.listing()
        content["members"] = [member.name for member in self.members.alive.values()]
        content["ended"] = {str(task): told for task, told in self.cluster.ended.items()}
        content["present"] = list(map(str, self.cluster.present()))
        self.answer(peer, frame.request, m.Text(content))

    def _listings(self) -> dict[str, Any]:
        listings = [desk.listing() for desk in self.desks]
        return {kind: {label(key): one for key, one in all_.items()} for kind, all_ in listings}

    def _report(self, peer: Peer, request: m.Report, frame: Frame) -> None:
        self.report(peer, request.times)
        self.answer(peer, frame.request, m.Done())

    def report(self, peer: Peer, times: Times) -> None:
        """Take note of where a session's time went."""
        peer.times, peer.heard = times, self.clock.now()

    def _stats(self, peer: Peer, request: m.Stats, frame: Frame) -> None:
        now = self.clock.now()
        content = self._listings()
        content["server"] = None if self.account is None else self.account.times()
        content["members"] = {
            each.name: {**each.told(now), "waits": self.parking.waits_of(each)}
            for each in self._peers
        }
        self.answer(peer, frame.request, m.Text(content))

    def _stop(self, peer: Peer, request: m.Stop, frame: Frame) -> None:
        self.stopping = True
        self.answer(peer, frame.request, m.Done())


def _not_here(peer: Peer, request: m.Request[Any], frame: Frame) -> None:
    raise Unsupported(
        f"{type(request).__name__}: asked of a server that does not do that; mirrors lend copies,"
        " and the servers of a cluster do all else"
    )
