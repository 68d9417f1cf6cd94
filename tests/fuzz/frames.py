"""Frames as bytes, whole ones and broken ones: cut, flipped, spliced, doubled, or telling lies.

All is drawn from a `random.Random`, so that a seed says it all.
"""

from __future__ import annotations

import fcntl
import functools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec
from samples import KINDS, Maker

from paceline.core import codec
from paceline.core import messages as m
from paceline.core.codec import ONE_WAY, PREFIX, PROTOCOL, REQUEST, Envelope
from paceline.core.errors import PacelineError
from paceline.core.names import parts

CORPUS = Path(__file__).with_name("corpus.txt")
"""Frames of every message as they are recorded: the message's name and the bytes, in hex."""

LENGTHS = [0, 1, 7, 63, 4096, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
PLACES = [0, 1, 8, 63, 64, 4096, 1 << 31, 1 << 62, (1 << 63) - 1, -1, -64, -(1 << 63)]


class Recorded(NamedTuple):
    """A frame taken apart."""

    header: bytes
    buffers: list[bytes]
    kind: int = REQUEST


class Sent(NamedTuple):
    """What goes over a socket at once: bytes, and descriptors that go along with them."""

    data: bytes
    fds: tuple[int, ...] = ()


def framed(
    frame: Recorded,
    number: int,
    *,
    envelope: bytes | None = None,
    received: int = 0,
    prefix: dict[str, int] | None = None,
) -> bytes:
    """A frame as it is sent; another envelope, or other numbers in its prefix, can be told."""
    inline = b"".join(frame.buffers)
    if envelope is None:
        places = [(0, 0, len(buffer), 0) for buffer in frame.buffers]
        envelope = codec.encode_envelope(Envelope(places)) if places else b""
    made = codec.Prefix(
        PROTOCOL, frame.kind, 0, len(frame.header), len(envelope), len(inline), 0, number, received
    )
    return PREFIX.pack(*made._replace(**(prefix or {}))) + frame.header + envelope + inline


def taken_apart(data: bytes) -> Recorded:
    """A frame that is whole."""
    prefix = codec.parse_prefix(data)
    start = PREFIX.size + prefix.header
    header, rest = data[PREFIX.size : start], data[start + prefix.envelope :]
    buffers = []
    if prefix.envelope:
        envelope = codec.parse_envelope(data[start : start + prefix.envelope])
        for _, _, nbytes, _ in envelope.buffers:
            buffers.append(rest[:nbytes])
            rest = rest[nbytes:]
    return Recorded(header, buffers, prefix.kind)


def recorded() -> dict[str, list[bytes]]:
    """The corpus: frames by the name of their message."""
    found: dict[str, list[bytes]] = {}
    for line in CORPUS.read_text().splitlines():
        name, _, data = line.partition(" ")
        found.setdefault(name, []).append(bytes.fromhex(data))
    return found


@functools.cache
def _corpus() -> list[Recorded]:
    return [taken_apart(data) for some in recorded().values() for data in some]


def record(most: int = 600) -> str:
    """The corpus anew: three small frames of every message."""
    lines = []
    for kind in sorted(KINDS, key=lambda kind: kind.__name__):
        maker = Maker(Random(kind.__name__))
        some: list[bytes] = []
        while len(some) < 3:
            request, buffers = maker.request(kind)
            data = framed(Recorded(m.encode(request), buffers), len(some) + 1)
            # An empty message has one form only.
            if len(data) <= most and (data not in some or len(data) < PREFIX.size + 8):
                some.append(data)
        lines += [f"{kind.__name__} {data.hex()}" for data in dict.fromkeys(some)]
    return "\n".join(lines) + "\n"


def harmed(data: bytes, random: Random) -> bytes:
    """The same with some bytes changed, cut out, doubled, or put elsewhere."""
    made = bytearray(data)
    for _ in range(1 + random.randrange(4)):
        at, size = random.randrange(len(made) + 1), random.randrange(8)
        some = made[at : at + size]
        match random.randrange(5):
            case 0 if made:
                made[at % len(made)] ^= 1 << random.randrange(8)
            case 1:
                del made[at:]
            case 2:
                made[at:at] = some
            case 3:
                del made[at : at + size]
            case _:
                made[at:at] = random.randbytes(size)
    return bytes(made)


class Breaker:
    """Makes frames that are wrong in one way or another. `maker` says who is spoken of."""

    def __init__(self, random: Random, maker: Maker, container: str) -> None:
        self.random = random
        self.maker = maker
        self._mine = container
        self._corpus = _corpus()
        self._last: list[bytes] = []

    def frame(self, number: int, *, passable: bool = False) -> bytes:
        """The next one, under that number; a `passable` one is a frame, and a request."""
        ways: list[Callable[[Recorded, int], bytes]] = [
            self._said, self._flipped, self._flipped, self._flipped, self._spliced, self._envelope,
            self._places, self._prefix, self._harmed, self._doubled,
        ]  # fmt: skip
        if passable:
            ways = [self._said, self._flipped, self._flipped, self._doubled]
        while True:
            made = self.random.choice(ways)(self._whole(), number)
            if not made or not harmless(made, self._mine):
                continue
            if not passable or passes(made):
                break
        self._last = [*self._last[-7:], made]
        return made

    def _whole(self) -> Recorded:
        if self.random.random() < 0.25:
            frame = self.random.choice(self._corpus)
            request: Any = m.decode_request(frame.header)
            if hasattr(request, "name"):
                # As it was recorded, but about what there is.
                request = msgspec.structs.replace(request, name=self.maker.name())
            return frame._replace(header=m.encode(request))
        request, buffers = self.maker.request()
        kind = ONE_WAY if self.random.random() < 0.05 else REQUEST
        return Recorded(m.encode(request), buffers, kind)

    def _said(self, frame: Recorded, number: int) -> bytes:
        """A request that is well formed: out of order, of what is not there, or a lie."""
        return framed(frame, number)

    def _flipped(self, frame: Recorded, number: int) -> bytes:
        return framed(frame._replace(header=harmed(frame.header, self.random)), number)

    def _spliced(self, frame: Recorded, number: int) -> bytes:
        """The header of one, with the buffers of another."""
        buffers = list(self._whole().buffers)
        if buffers and self.random.random() < 0.5:
            place = self.random.randrange(len(buffers))
            buffers[place] = harmed(buffers[place][:256], self.random)
        return framed(frame._replace(buffers=buffers), number)

    def _envelope(self, frame: Recorded, number: int) -> bytes:
        places = [(0, 0, len(buffer), 0) for buffer in frame.buffers]
        whole = codec.encode_envelope(Envelope(places))
        return framed(frame, number, envelope=harmed(whole, self.random))

    def _places(self, frame: Recorded, number: int) -> bytes:
        """Buffers that are not where, or as long as, they are said to be."""
        random = self.random
        places = []
        for buffer in frame.buffers or [b""]:
            place = [0, 0, len(buffer), 0]
            place[random.randrange(4)] = random.choice(PLACES)
            places.append(tuple(place))
        said = Envelope(
            places,  # type: ignore[arg-type]
            [(random.choice(PLACES), random.choice(PLACES))] * (random.random() < 0.2),
            [random.choice(PLACES) for _ in range(random.randrange(3))],
            [random.choice(PLACES) for _ in range(random.randrange(3))],
        )
        return framed(frame, number, envelope=codec.encode_envelope(said))

    def _prefix(self, frame: Recorded, number: int) -> bytes:
        random = self.random
        field = random.choice(codec.Prefix._fields)
        most = {"protocol": 255, "kind": 255, "reserved": 65535}
        value = random.choice([*LENGTHS, random.randrange(1 << 16)])
        return framed(frame, number, prefix={field: value % (most.get(field, 1 << 32) + 1)})

    def _harmed(self, frame: Recorded, number: int) -> bytes:
        return harmed(framed(frame, number), self.random)

    def _doubled(self, frame: Recorded, number: int) -> bytes:
        """What was sent before comes once more, or in the midst of something else."""
        if not self._last:
            return framed(frame, number)
        again = self.random.choice(self._last)
        if self.random.random() < 0.7:
            return again
        at = self.random.randrange(len(again))
        return again[:at] + framed(frame, number)

    def shared(self, number: int) -> Sent:
        """A frame about shared memory: sealed or not, there or not, where it is said to be or not.

        Whoever sends it closes the descriptors.
        """
        random = self.random
        size = random.choice([0, 4096, 65536, 1 << 40])
        there = random.choice([size, size, 0, 4096]) if size < 1 << 40 else 0
        fds = tuple(
            _segment(size, min(there, size), sealed=random.random() < 0.8)
            for _ in range(random.choice([0, 1, 1, 1, 2, 3]))
        )
        frame = self._whole()
        uid = random.choice([1, 1, 2, 3])
        said = random.choice([size, size, size, *PLACES])
        places = []
        for buffer in frame.buffers or [b""]:
            offset = random.choice([0, 0, 0, 64, *PLACES])
            nbytes = random.choice([len(buffer), len(buffer), len(buffer), *PLACES])
            places.append((uid, offset, nbytes, random.choice([1, 2, 3, *PLACES])))
        pins = [random.choice([1, 2, 3, *PLACES]) for _ in range(random.randrange(3))]
        segments = [(uid + n, said) for n in range(random.choice([len(fds), len(fds), 1]))]
        envelope = Envelope(places, segments, pins, [uid] * (random.random() < 0.2))
        encoded = codec.encode_envelope(envelope)
        data = framed(frame._replace(buffers=[]), number, envelope=encoded)
        if harmless(data, self._mine):
            return Sent(data, fds)
        for fd in fds:
            os.close(fd)
        return self.shared(number)


def _segment(size: int, there: int, *, sealed: bool) -> int:
    fd = os.memfd_create("fuzz", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if there:
        os.posix_fallocate(fd, 0, there)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def passes(data: bytes) -> bool:
    """Whether these bytes are one frame with a request, whatever it says."""
    try:
        found = taken_apart(data)
        request = m.decode_request(found.header)
        return framed(found, 0)[: PREFIX.size - 24] == data[: PREFIX.size - 24] and not isinstance(
            request, m.Leave
        )
    except (PacelineError, struct.error):
        return False


def harmless(data: bytes, container: str) -> bool:
    """Whether a server may carry these bytes out: they order nothing but what is the sender's.

    Who knows the secret may well end the server, hold it up, or reset what is others'.
    """
    at = data.find(bytes([PROTOCOL]))
    while at >= 0:
        if len(data) - at >= PREFIX.size and not _harmless(data[at:], container):
            return False
        at = data.find(bytes([PROTOCOL]), at + 1)
    return True


def _harmless(data: bytes, container: str) -> bool:
    try:
        prefix = codec.parse_prefix(data)
        request: Any = m.decode_request(data[PREFIX.size : PREFIX.size + prefix.header])
        if isinstance(request, m.Stop | m.RequestStop | m.Freeze):
            return False
        if isinstance(request, m.Reset):
            return request.containers is not None and set(request.containers) <= {container}
        if getattr(request, "container", container) != container:
            return False
        name = getattr(request, "name", "")
        return not name or parts(name).container in ("", container)
    except PacelineError:
        return True


if __name__ == "__main__":
    CORPUS.write_text(record())
