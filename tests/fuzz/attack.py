"""Peers that know the secret and speak nonsense, and some that do not know it.

What they say is drawn from a seed, and from numbers that the servers gave. What the last connection
said is kept, to be said again.
"""

from __future__ import annotations

import itertools
import os
import socket
import ssl
import struct
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import TypeAlias

from fuzz.frames import Breaker, Recorded, Sent, framed
from fuzz.records import Sealed
from samples import Maker, numbers_in

from paceline.core import codec
from paceline.core import messages as m
from paceline.core.account import Times
from paceline.core.codec import ERROR, PREFIX, REPLY
from paceline.core.errors import PacelineError
from paceline.core.handshake import ANSWER, CHALLENGE, VERDICT, ClientSide
from paceline.transports.base import Address
from paceline.transports.tcp import host_and_port
from paceline.transports.tls import binding
from paceline.transports.unix import socket_name

PATIENCE = 60.0
"""Seconds for an answer, or for the end of a connection."""

BLOCK = 500
"""Connections after which what they made is removed."""

RECENT = 1000
"""Connections of which it is kept what they said."""

REPORT = m.Report(Times(0.0, 0.0, "idle", {}))
"""What is answered at once: when it is, all before it has been taken in."""

NEVER = 1 << 40
"""The number of a request that is none of the nonsense."""


class Unanswered(Exception):
    """The server neither answered nor ended a connection in time."""


class Raw:
    """A connection that is only a socket.

    Attributes:
        said: all that was sent, in hex: "proves" the secret, and then a line each.
    """

    def __init__(self, target: str, patience: float = PATIENCE) -> None:
        self.said = [target]
        address = Address.parse(target)
        self.shares = address.transport == "unix"
        self._rest = b""
        self._tls: Sealed | None = None
        if self.shares:
            self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.sock.settimeout(patience)
            self.sock.connect(socket_name(address.place))
        else:
            self.sock = socket.create_connection(host_and_port(address.place), patience)

    def sealed(self, context: ssl.SSLContext) -> Sealed:
        """What goes through TLS from now on, except what is sent as it is."""
        self._tls = Sealed(self.sock, context)
        return self._tls

    def prove(self, secret: bytes) -> None:
        """Shake hands, of TLS first where that is wanted."""
        self.said.append("proves")
        bound = b""
        if self._tls is not None:
            self._tls.shake()
            bound = binding(self._tls.certificate)
        client = ClientSide(secret, os.urandom(32), bound)
        self._through.sendall(client.answer(self._exactly(CHALLENGE)))
        client.check(self._exactly(VERDICT))

    @property
    def _through(self) -> socket.socket | Sealed:
        return self._tls or self.sock

    def send(self, sent: Sent | bytes) -> bool:
        """Send all of it, through TLS if there is some; whether the server took it."""
        data, fds = sent if isinstance(sent, Sent) else (sent, ())
        self.said.append(data.hex())
        try:
            if fds:
                gone = socket.send_fds(self.sock, [data], fds)
                data = data[gone:]
            self._through.sendall(data)
        except TimeoutError:
            raise Unanswered("it does not read") from None
        except OSError:
            return False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def reply(self) -> tuple[codec.Prefix, bytes] | None:
        """The next reply; `None` at the end of the connection."""
        while True:
            if len(self._rest) >= PREFIX.size:
                prefix = codec.parse_prefix(self._rest)
                end = PREFIX.size + prefix.header
                size = end + prefix.envelope + prefix.inline
                if len(self._rest) >= size:
                    header, self._rest = self._rest[PREFIX.size : end], self._rest[size:]
                    return prefix, header
            data = self._some()
            if not data:
                return None
            self._rest += data

    def _some(self) -> bytes:
        try:
            if not self.shares:
                return self._through.recv(1 << 16)
            data, fds, _, _ = socket.recv_fds(self.sock, 1 << 16, 64)
        except TimeoutError:
            raise Unanswered("it says nothing") from None
        except OSError:
            return b""
        for fd in fds:
            os.close(fd)
        return data

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            some = self._through.recv(nbytes - len(data))
            if not some:
                raise ConnectionError("the server hung up")
            data += some
        return data

    def say(self, data: bytes) -> bool:
        """Send bytes as they are, whatever there is of TLS; whether the server took them."""
        self.said.append(f"as it is: {data.hex()}")
        try:
            self.sock.sendall(data)
        except TimeoutError:
            raise Unanswered("it does not read") from None
        except OSError:
            return False
        return True

    def heard(self) -> bytes:
        """Bytes as they come, of TLS or not; none at the end."""
        try:
            return self.sock.recv(1 << 16)
        except TimeoutError:
            raise Unanswered("it neither says anything nor hangs up") from None
        except OSError:
            return b""

    def half_close(self) -> None:
        """Nothing more is said; there may be answers."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End it at once, and throw away what has arrived."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


def again(text: str, targets: list[str], secret: bytes) -> list[str]:
    """Have a connection once more that said that; what it hears."""
    transport, *lines = text.split()
    kind = transport.partition(":")[0]
    raw = Raw(next(target for target in targets if target.startswith(kind)))
    for line in lines:
        if line == "proves":
            raw.prove(secret)
        else:
            raw.send(bytes.fromhex(line))
    raw.half_close()
    heard = []
    while (found := raw.reply()) is not None:
        heard.append(f"{found[0].request}: {m.decode_reply(found[1])}")
    raw.sock.close()
    return heard


Style: TypeAlias = Callable[[Raw, Random, Breaker], None]


class Attacker:
    """Makes connection after connection to some servers.

    Attributes:
        told: how many frames were sent, taken in, answered, and how; how many connections.
        failures: what a server did that it may not do, with all that this connection said.
        recent: what the last connections said, by the names that they joined with.
    """

    def __init__(self, targets: list[str], secret: bytes, seed: int, index: int) -> None:
        self.told: Counter[str] = Counter()
        self.failures: list[str] = []
        self.recent: OrderedDict[str, list[str]] = OrderedDict()
        self._targets = targets
        self._secret = secret
        self._seed = seed
        self._index = index
        self._seen: list[int] = []
        self._name = ""
        self._container = f"mad{index}"
        self._generation = 0
        self._outdated = False
        self._slow: list[tuple[Raw, bytes, Callable[[bytes], bool]]] = []

    def run(self, frames: int, stop: threading.Event) -> None:
        """Go on until that many broken frames were taken in, something failed, or `stop`."""
        for number in itertools.count():
            if self.told["frames"] >= frames or self.failures or stop.is_set():
                break
            self.connect(number)
        self.close()

    def connect(self, number: int) -> None:
        """Make the connection of that number."""
        self._name = f"mad-{self._seed}.{self._index}.{number}"
        random = Random(self._name)
        self.told["connections"] += 1
        if number % BLOCK == BLOCK - 1:
            self._ask(m.Reset([self._container]))
        if self._outdated or number % BLOCK == BLOCK - 1:
            self._ask(m.Enter(self._container))
            self._outdated = False
        target = random.choice(self._targets)
        style = self.style(random, target)
        maker = Maker(random, self._container)
        maker.seen, maker.generation = self._seen, self._generation
        try:
            raw = Raw(target)
        except OSError as e:
            self.failures.append(f"{self._name}: cannot connect to {target}: {e}")
            return
        self.recent[self._name] = raw.said
        if len(self.recent) > RECENT:
            self.recent.popitem(last=False)
        try:
            self.ready(raw, style)
            style(raw, random, Breaker(random, maker, self._container))
        except Unanswered as e:
            self.failures.append(f"{self._name}: {target}: {e}, after\n{chr(10).join(raw.said)}")
        except (ConnectionError, ssl.SSLError, PacelineError) as e:
            # The server may be out of places for whoever has proved nothing.
            self.told[f"broke: {type(e).__name__}"] += 1
        finally:
            if not any(raw is slow for slow, _, _ in self._slow):
                raw.sock.close()
        del self._seen[:-32]

    def style(self, random: Random, target: str) -> Style:
        """What a connection to that server is for."""
        return random.choices(
            [self._storm, self._stranger, self._garbage, self._drip, self._shared],
            [80, 4, 4, 2, 10],
        )[0]

    def ready(self, raw: Raw, style: Style | None) -> None:
        """Go as far as the secret; a stranger does not know it."""
        if style != self._stranger:
            raw.prove(self._secret)

    def close(self) -> None:
        """Let go of what goes slowly."""
        for raw, _, _ in self._slow:
            raw.sock.close()
        self._slow.clear()

    def _ask(self, request: m.Request[m.Text]) -> None:
        """Ask all servers something, and take note of the generation that they say."""
        for target in self._targets:
            raw = Raw(target)
            with suppress(ConnectionError, ssl.SSLError):
                self.ready(raw, None)
                raw.send(framed(Recorded(m.encode(m.Join("mad", -1, 1)), []), 1))
                raw.send(framed(Recorded(m.encode(request), []), 2))
                raw.reply()
                if (found := raw.reply()) is not None and found[0].kind == REPLY:
                    said = m.decode_reply(found[1]).content
                    if isinstance(request, m.Enter):
                        self._generation = max(self._generation, said)
            raw.sock.close()

    def _join(self, raw: Raw, random: Random) -> None:
        if random.random() < 0.03:
            return
        token = random.randbytes(16) if random.random() < 0.2 else b""
        raw.send(framed(Recorded(m.encode(m.Join(self._name, -1, 1, token)), []), NEVER))

    def _storm(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Many frames at once, and then what tells how many of them were taken in.

        Those that end the connection, whatever the server has, come last.
        """
        self._join(raw, random)
        count = random.choice([1, 4, 16, 64])
        for number in range(1, count + 1):
            if not raw.send(breaker.frame(number, passable=number < count)):
                break
        self._end(raw, random, count)

    def _shared(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """What is said of shared memory, also where there is none."""
        self._join(raw, random)
        count = random.choice([1, 2, 4])
        for number in range(1, count + 1):
            sent = breaker.shared(number)
            if not raw.shares:
                for fd in sent.fds:
                    os.close(fd)
                sent = Sent(sent.data)
            if not raw.send(sent):
                break
        self._end(raw, random, count)

    def _end(self, raw: Raw, random: Random, count: int) -> None:
        chance = random.random()
        if chance < 0.05:
            raw.reset()
            return
        raw.send(framed(Recorded(m.encode(REPORT), []), NEVER + 1))
        raw.half_close()
        if chance < 0.1:
            return
        newest, whole = 0, False
        while (found := raw.reply()) is not None:
            prefix, header = found
            newest = max(newest, prefix.request if prefix.request <= count else 0)
            whole = whole or prefix.request == NEVER + 1
            reply = m.decode_reply(header)
            if prefix.kind == ERROR:
                self.told[reply.code] += 1
                self._outdated = self._outdated or reply.code == "WasReset"
            elif prefix.request < NEVER:
                self.told["answered"] += 1
                self._seen += numbers_in(reply)
        # Who was cut off without a word had sent one frame more than was answered, or several.
        self.told["frames"] += count if whole else min(count, newest + 1)
        self.told["cut off"] += not whole

    def _stranger(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Who does not know the secret."""
        said = breaker.frame(1) if random.random() < 0.5 else random.randbytes(ANSWER)
        raw.send(said)
        if random.random() < 0.5:
            raw.half_close()
            while raw._some():
                """What it answers is no frame."""
        self.told["frames"] += 1

    def _garbage(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """Bytes that are no frame, or the beginning of a very large one."""
        self._join(raw, random)
        said = random.randbytes(random.choice([1, 47, 48, 49, 1000, 100_000]))
        if random.random() < 0.5:
            header, envelope = (random.choice([0, 10, 1 << 24, 1 << 26]) for _ in range(2))
            inline = random.choice([0, 100, 1 << 30, 1 << 34, (1 << 34) + 1])
            head = codec.Prefix(codec.PROTOCOL, 0, 0, header, envelope, inline, 0, 1, 0)
            said = PREFIX.pack(*head) + said
        raw.send(said)
        self._end(raw, random, 1)

    def _drip(self, raw: Raw, random: Random, breaker: Breaker) -> None:
        """A frame that comes a few bytes at a time, while other connections come and go."""
        self._join(raw, random)
        self.slowly(raw, random, breaker.frame(1), raw.send)

    def slowly(self, raw: Raw, random: Random, data: bytes, send: Callable[[bytes], bool]) -> None:
        """Send this a few bytes at a time, and go on with what others send so."""
        self._slow.append((raw, data, send))
        for place, (slow, left, send) in enumerate(list(self._slow)):
            some = random.randrange(1, 40)
            send(left[:some])
            self._slow[place] = (slow, left[some:], send)
        done = [slow for slow, left, _ in self._slow if not left or len(self._slow) > 16][:8]
        for slow in done:
            self.told["frames"] += 1
            slow.sock.close()
        self._slow = [one for one in self._slow if not any(one[0] is slow for slow in done)]
