"""Hosts that are network namespaces: what joins them, and what can be done to it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from namespaces import LIMIT, Network, needs_namespaces, needs_wires

MB = 1 << 20

ECHO = """
import socket
with socket.create_server(("{address}", 4000)) as listener:
    print("listens", flush=True)
    while True:
        sock, _ = listener.accept()
        with sock:
            while data := sock.recv(1 << 16):
                sock.sendall(data)
"""

ASK = """
import socket, sys, threading, time
address, count = sys.argv[1], int(sys.argv[2])
with socket.create_connection((address, 4000), {limit}) as sock:
    began = time.monotonic()
    thread = threading.Thread(target=sock.sendall, args=(bytes(count),))
    thread.start()
    got = 0
    while got < count:
        got += len(sock.recv(1 << 16))
    thread.join()
    print(time.monotonic() - began, flush=True)
"""


def asked(network: Network, count: int, limit: float = LIMIT) -> float:
    """The seconds in which that many bytes went from h1 to h0 and back."""
    one, two = network.hosts[:2]
    echo = one.python("-c", ECHO.format(address=one.address))
    assert echo.stdout is not None
    assert echo.stdout.readline() == "listens\n"
    asking = two.python("-c", ASK.format(limit=limit), one.address, str(count))
    out, err = asking.communicate(timeout=60)
    assert asking.returncode == 0, err
    return float(out)


@needs_namespaces
def test_what_goes_between_hosts_is_counted_at_their_links() -> None:
    with Network(3) as network:
        before = [host.carried() for host in network.hosts]
        asked(network, MB)
        after = [host.carried() for host in network.hosts]
        came, went = zip(
            *((a[0] - b[0], a[1] - b[1]) for a, b in zip(after, before, strict=True)), strict=True
        )
        for number in (*came[:2], *went[:2]):
            assert MB <= number < 1.2 * MB
        assert came[2] < 10_000
        assert went[2] < 10_000


@needs_namespaces
def test_a_rate_bounds_what_a_link_carries() -> None:
    with Network(2) as network:
        network.hosts[0].limit("100mbit")
        # Its first MB is not held up.
        assert asked(network, 6 * MB) > 5 * MB / (100e6 / 8) * 0.9


@needs_wires
def test_frames_are_delayed_and_lost() -> None:
    with Network(2, delay=0.03) as network:
        # Two wires there and two back.
        assert 0.12 <= asked(network, 1) < 2.0
    with Network(2, loss=0.02) as network:
        assert asked(network, MB) < LIMIT


@needs_namespaces
def test_a_host_that_is_cut_off_is_reached_again_after_it_has_healed() -> None:
    with Network(2) as network:
        host = network.hosts[0]
        asked(network, 1)
        host.cut()
        with pytest.raises(AssertionError, match=r"(?s)^Traceback.*(timed out|No route)"):
            asked_again(network)
        host.heal()
        assert asked_again(network) < LIMIT


def asked_again(network: Network) -> float:
    one, two = network.hosts[:2]
    asking = two.python("-c", ASK.format(limit=1.0), one.address, "1")
    out, err = asking.communicate(timeout=60)
    assert asking.returncode == 0, err
    return float(out)


@needs_namespaces
def test_networks_of_a_process_that_was_killed_are_removed() -> None:
    script = (
        "import namespaces, sys; n = namespaces.Network(2);"
        "there = n.hosts[0].python('-c', 'print(1); input()', stdin=namespaces.subprocess.PIPE);"
        "there.stdout.readline(); print(n.prefix, flush=True); sys.stdin.read()"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    prefix = killed.stdout.readline().strip()
    killed.kill()
    killed.communicate()
    there = [name for name in os.listdir("/run/netns") if name.startswith(prefix)]
    assert len(there) == 3
    began = time.monotonic()
    with Network(1):
        left = [name for name in os.listdir("/run/netns") if name.startswith(prefix)]
        assert left == []
    assert time.monotonic() - began < LIMIT
