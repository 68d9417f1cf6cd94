"""What drives a service: an event loop over connections."""

from __future__ import annotations

import errno
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from paceline.core.account import BUSY, IDLE, Account
from paceline.core.errors import Closed, Disconnected, PacelineError, ProtocolError, Refused
from paceline.server.accumulator_desk import AccumulatorDesk
from paceline.server.cluster_desk import ClusterDesk
from paceline.server.collection_desk import CollectionDesk
from paceline.server.cut_desk import CutDesk
from paceline.server.lanes import Lanes
from paceline.server.lines import Peer, new_epoch
from paceline.server.operation_desk import OperationDesk
from paceline.server.part_desk import HomeDesk, PartDesk
from paceline.server.poller import READ, WRITE, Poller, sooner
from paceline.server.program_desk import ProgramDesk
from paceline.server.queue_desk import QueueDesk
from paceline.server.reader_desk import ReaderDesk
from paceline.server.rows_desk import RowsDesk
from paceline.server.service import Desk, Finish, Service, Work
from paceline.server.strangers import Strangers
from paceline.server.tag_desk import TagDesk
from paceline.server.together_desk import TogetherDesk
from paceline.server.variable_desk import VariableDesk
from paceline.server.work_desk import BarrierDesk, CounterDesk
from paceline.transports.base import UNREAD_LIMIT, Frame, transport
from paceline.transports.greeting import Greeting

R = TypeVar("R")

DESKS = (
    VariableDesk, TagDesk, RowsDesk, QueueDesk, CollectionDesk, CounterDesk, BarrierDesk,
    ReaderDesk, ClusterDesk, AccumulatorDesk, OperationDesk, HomeDesk, PartDesk,
    TogetherDesk, ProgramDesk, CutDesk,
)  # fmt: skip
RELEASES = 16
MAX_CONNECTIONS = 4096
"""Connections that a server has at once, unless told otherwise."""

UNNAMED = 64
"""Connections beyond these whose first request is answered, with the reason."""

LINGER = 5.0
"""Seconds that a session over TCP may be without a connection before it counts as lost.

Long enough to call again when a router or a proxy dropped the connection, since whoever notices
calls at once, and short enough for those who wait for what a dead process holds: its task, its
turn, items it had not receipted. A process's own end cannot be told from a cut connection.
"""

FAILURES = 16
"""Turns of the loop in a row that end in an error before the server does."""

PAUSE = 0.5
"""Seconds until a listener that could not accept tries again."""

GRACE = 2.0
"""Seconds that operations have to end when their server does."""


class Server:
    """Serves sessions at its listeners, in the thread that calls `serve`.

    A listener has `fileno`, `local`, `accept(secret, arena)` and `close`. `on_note` hears what an
    operator would want to know, such as a peer that was cut off. A session whose connection breaks,
    where that need not be its end, is kept for `linger` seconds. When there are
    `max_connections` that have proved the secret, new sessions are refused. Its epoch is no less
    than `least_epoch`. It does what its `desks` do, by default all of them.

    Raises:
        Refused: other hosts could reach a listener, and there is no secret.
    """

    def __init__(
        self,
        listeners: Sequence[Any],
        secret: bytes,
        *,
        shares: str = "unix",
        linger: float = LINGER,
        max_connections: int = MAX_CONNECTIONS,
        on_note: Callable[[str], None] = lambda note: None,
        least_epoch: int = 0,
        desks: Sequence[Callable[[Service], Desk]] = (),
    ) -> None:
        for listener in listeners:
            if not secret and not listener.local:
                raise Refused(
                    f"cannot serve at {listener.place} without a secret: other hosts can reach it;"
                    " give the server and its sessions a secret, or listen at 127.0.0.1"
                )
        self._listeners = listeners
        self._secret = secret
        self._note = on_note
        self._arena = transport(shares).arena()
        self._done: deque[Callable[[], None]] = deque()
        self._pool = ThreadPoolExecutor(1, "paceline-long-work")
        self._lanes = Lanes()
        self._over = False
        self._saying = threading.Lock()
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self.service = Service(
            self._arena, new_epoch(least_epoch), desks or DESKS,
            run_long=self._run_long, linger=linger, moved=self._moved,
        )  # fmt: skip
        self.service.beside = self._start
        self.service.dismiss = self._dismiss
        self._poller = Poller()
        self._peers: dict[Any, Peer] = {}
        self._most = max_connections
        self._strangers = Strangers(self._drop_greeting, on_note)
        self._lingering: dict[Peer, float] = {}
        self._deaf: dict[Any, float] = {}
        self._backlog: set[Any] = set()
        self._poller.watch(self._woken.fileno(), self._wake)
        for listener in listeners:
            self._poller.watch(listener.fileno(), self._accepting(listener))

    def serve(self) -> None:
        """Serve until a session asks the server to stop, or `stop` is called."""
        try:
            self._serve()
        finally:
            with self._saying:
                self._over = True
            self._do_what_is_done()

    def do(self, call: Callable[[], R]) -> R:
        """Make a call on the thread that serves, between two requests; what it returns.

        Raises:
            Closed: the server has ended.
        """
        made: Future[R] = Future()

        def run() -> None:
            try:
                made.set_result(call())
            except BaseException as e:
                made.set_exception(e)

        self._say(run)
        return made.result()

    def _serve(self) -> None:
        account = self.service.account = Account(BUSY)
        failed = 0
        while not self.service.stopping:
            try:
                self._turn(account)
                failed = 0
            except Exception:
                # What failed is over, and what else is ready stays so.
                failed += 1
                if failed == FAILURES:
                    raise
                self._note(f"went on after an error:\n{traceback.format_exc()}")

    def _turn(self, account: Account) -> None:
        if self._done:
            self._do_what_is_done()
        limit = self.service.tick()
        if self.service.freezing.due:
            limit = self.service.catch_up(self._feed_kept)
        if self._strangers:
            limit = sooner(limit, self._strangers.expire())
        if self._lingering:
            limit = sooner(limit, self._expire_lingering())
        if self._deaf:
            limit = sooner(limit, self._listen_again())
        if self._backlog:
            limit = sooner(limit, PAUSE)
        account.enter(IDLE)
        self._poller.wait(limit, account)
        if self._backlog:
            self._want_writes()

    def stop(self) -> None:
        """End `serve`, from any thread or a signal handler."""
        self.service.stopping = True
        self._waker.send(b"x")

    def close(self, why: PacelineError | None = None) -> None:
        """End every connection and stop listening. Idempotent.

        Sessions that can be told hear `why`.
        """
        for listener in self._listeners:
            listener.close()
        for channel, peer in list(self._peers.items()):
            peer.dismiss(why)
            channel.close()
        self._strangers.close()
        self._peers.clear()
        for lane in self._lanes.close(GRACE):
            self._note(f"an operation of {lane or 'all'} goes on after the end of its server")
        self._pool.shutdown(cancel_futures=True)
        self._poller.close()
        self._woken.close()
        self._waker.close()
        self._arena.close()

    def _accepting(self, listener: Any) -> Callable[[int], None]:
        return lambda events: self._accept(listener)

    def _accept(self, listener: Any) -> None:
        try:
            greeting = listener.accept(self._secret, self._arena)
        except OSError as e:
            if self._strangers and e.errno in (errno.EMFILE, errno.ENFILE):
                # Who has proved nothing makes room.
                self._strangers.drop_one()
                return
            # Whoever knocks stays ready, and would keep the loop busy in vain.
            self._note(f"cannot accept connections, will try again in {PAUSE} s: {e.strerror}")
            self._poller.forget(listener.fileno())
            self._deaf[listener] = time.monotonic() + PAUSE
            return
        if greeting is None:
            return
        self._strangers.add(greeting)
        self._poller.watch(greeting.fileno(), lambda events: self._greet(greeting))

    def _greet(self, greeting: Greeting) -> None:
        try:
            channel: Any = greeting.advance()
        except Exception as e:
            # Whatever it is, it is the stranger's.
            self._strangers.refused(greeting, e)
            return
        if channel is None:
            self._poller.want(greeting.fileno(), READ | WRITE if greeting.wants_write else READ)
            return
        self._strangers.remove(greeting)
        fileno = channel.fileno()
        self._poller.forget(fileno)
        channel.on_backlog = self._backlog.add
        peer = Peer(channel)
        beyond = len(self._peers) - self._most
        if beyond >= 0:
            peer.unwanted = f"it has {self._most} connections, max_connections={self._most}"
            if beyond >= UNNAMED:
                self._note(f"dropped a connection: {peer.unwanted}, and {beyond} that were refused")
                channel.close()
                return
        self._peers[channel] = peer
        self._poller.watch(fileno, lambda events: self._ready(channel, fileno, peer, events))

    def _expire_lingering(self) -> float:
        now = time.monotonic()
        for peer, until in list(self._lingering.items()):
            if until <= now:
                del self._lingering[peer]
                self._note(f"lost {peer.name}: its connection broke, and it made no other in time")
                self.service.lost(peer)
        return min(self._lingering.values(), default=now + PAUSE) - now

    def _listen_again(self) -> float:
        now = time.monotonic()
        for listener, until in list(self._deaf.items()):
            if until <= now:
                del self._deaf[listener]
                self._poller.watch(listener.fileno(), self._accepting(listener))
        return min(self._deaf.values(), default=now + PAUSE) - now

    def _drop_greeting(self, greeting: Greeting) -> None:
        self._poller.forget(greeting.fileno())
        greeting.close()

    def _ready(self, channel: Any, fileno: int, peer: Peer, events: int) -> None:
        try:
            if events & WRITE:
                channel.send_more()
            if events & ~WRITE:
                while (frame := channel.receive(0)) is not None:
                    self.service.feed(peer, frame)
                    if not channel.more:
                        break
                if peer.window is not None:
                    peer.window.acknowledge(channel.acknowledged)
            if channel.releases >= RELEASES and not peer.left:
                channel.flush()
        except Disconnected:
            self._lose(channel, fileno, broken=True)
        except Exception as e:
            # One peer's request must not end the others' server.
            self._cut_off(peer, e)

    def _feed_kept(self, peer: Peer, frame: Frame) -> None:
        try:
            self.service.feed(peer, frame, kept=True)
        except Exception as e:
            self._cut_off(peer, e)

    def _cut_off(self, peer: Peer, e: Exception) -> None:
        broke = isinstance(e, ProtocolError)
        why = f": {e}" if broke else f" after an error:\n{traceback.format_exc()}"
        self._note(f"cut off {peer.name}{why}")
        channel: Any = peer.channel
        if self._peers.get(channel) is peer:
            self._lose(channel, channel.fileno())

    def _lose(self, channel: Any, fileno: int, *, broken: bool = False) -> None:
        """A connection has ended, and with it its session, unless that can make another one."""
        self._poller.forget(fileno)
        peer = self._peers.pop(channel)
        channel.close()
        if broken and peer.window is not None and not peer.left:
            peer.lingers = True
            self._lingering[peer] = time.monotonic() + self.service.lines.linger
        else:
            self.service.lost(peer)

    def _dismiss(self, peer: Peer) -> None:
        if self._lingering.pop(peer, None) is not None:
            self.service.lost(peer)
        elif self._peers.get(peer.channel) is peer:
            channel: Any = peer.channel
            self._lose(channel, channel.fileno())

    def _moved(self, new: Peer, known: Peer) -> None:
        """A session goes on over another connection."""
        self._lingering.pop(known, None)
        channel: Any
        if self._peers.get(known.channel) is known:
            # This end has not noticed that the one before is broken.
            channel = known.channel
            self._poller.forget(channel.fileno())
            del self._peers[channel]
            channel.close()
        channel = new.channel
        fileno = channel.fileno()
        self._peers[channel] = known
        self._poller.hand(fileno, lambda events: self._ready(channel, fileno, known, events))

    def _want_writes(self) -> None:
        """Hear from each channel that could not send all, until it has."""
        for channel in list(self._backlog):
            if channel.stalled > UNREAD_LIMIT:
                name = self._peers[channel].name
                self._note(f"cut off {name}: it has read nothing for {UNREAD_LIMIT:.0f} s")
                self._lose(channel, channel.fileno())
            elif channel in self._peers:
                self._poller.want(channel.fileno(), READ | WRITE if channel.unsent else READ)
            if channel not in self._peers or not channel.unsent:
                self._backlog.discard(channel)

    def _run_long(self, work: Work, finish: Finish) -> None:
        def run() -> None:
            error: Exception | None = None
            try:
                work()
            except Exception as e:
                error = e
            with suppress(Closed):
                self._say(lambda: finish(error))

        self._pool.submit(run)

    def _start(self, lane: str, threads: int, work: Work, finish: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with suppress(Closed):
                    self._say(finish)

        self._lanes.run(lane, threads, run)

    def _say(self, done: Callable[[], None]) -> None:
        """Have this called on the thread that serves."""
        with self._saying:
            if self._over:
                raise Closed("the server has ended")
            self._done.append(done)
            self._waker.send(b"x")

    def _wake(self, events: int) -> None:
        try:
            self._woken.recv(4096)
        except BlockingIOError:
            return
        self._do_what_is_done()

    def _do_what_is_done(self) -> None:
        while self._done:
            self._done.popleft()()
