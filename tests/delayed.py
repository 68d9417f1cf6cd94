"""A wire between two devices of the kernel's, which it makes: delays frames, and loses some.

`delayed.py NAME DELAY LOSS SEED` makes NAME and NAME-far. It runs until it is killed, and the
devices go with it.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import struct
import sys
import time

TUNSETIFF = 0x400454CA
TAP, NO_INFO = 0x2, 0x1000
MOST = 1 << 16
"""Bytes of a frame at most; and frames under way, beyond which they are lost, as in any queue."""


def device(name: str) -> int:
    """A device; what goes out of it can be read here, and what is written comes in at it."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), TAP | NO_INFO))
    return fd


def carry(near: int, far: int, delay: float, loss: float, draw: random.Random) -> None:
    """Carry frames both ways, in order, each `delay` seconds after it came."""
    other = {near: far, far: near}
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        ready, _, _ = select.select([near, far], [], [], wait)
        now = time.monotonic()
        for fd in ready:
            try:
                frame = os.read(fd, MOST)
            except OSError:
                continue
            number += 1
            if draw.random() >= loss and len(under_way) < MOST:
                heapq.heappush(under_way, (now + delay, number, other[fd], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, fd, frame = heapq.heappop(under_way)
            try:
                os.write(fd, frame)
            except OSError:
                # The device is down, or its queue full: the frame is lost.
                continue


def main() -> None:
    name, delay, loss, seed = sys.argv[1:]
    near, far = device(name), device(f"{name}-far")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(near, far, float(delay), float(loss), random.Random(int(seed)))


if __name__ == "__main__":
    main()
