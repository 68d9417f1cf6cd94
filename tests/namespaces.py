"""Several hosts on one machine: network namespaces, each with an address, joined by a switch.

All of a `Network` is in namespaces of its own, the switch too, so the machine's network is left
alone, and what is removed with them is everything. Those of a process that was killed are removed
when the next network is made.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

PREFIX = "paceline-"
FILES = Path("/etc/netns")
"""Where each namespace may have a folder of files that its programs see in place of /etc's."""

LIMIT = 20.0
"""Seconds for a command that takes a few milliseconds where nobody else does anything."""

_numbers = itertools.count()


@cache
def lacking() -> str:
    """What this machine lacks for namespaces; empty if nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "network namespaces need the commands ip and tc: install iproute2"
    name = f"{PREFIX}{os.getpid()}-try"
    tried = _run("ip", "netns", "add", name, check=False)
    if tried.returncode:
        return f"network namespaces are not permitted: {tried.stderr.strip()}"
    made = _run("ip", "-n", name, "link", "add", "name", "br", "type", "bridge", check=False)
    _run("ip", "netns", "del", name)
    return f"bridges are not permitted: {made.stderr.strip()}" if made.returncode else ""


class Host:
    """A namespace with one address. Programs that run in it see no other network."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.namespace = f"{network.prefix}{name}"
        self._network = network
        self._port = name

    def command(self, *words: str) -> list[str]:
        """How that command is run here."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command here; the network ends it when it is closed."""
        options = {
            "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
            "text": True,
        } | options  # fmt: skip
        made = subprocess.Popen(self.command(*words), **options)
        self._network.started.append(made)
        return made

    def python(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        """Start a Python program here."""
        return self.start(sys.executable, "-u", "-W", "error", *words, **options)

    def run(self, *words: str) -> None:
        """Run a command here that ends by itself."""
        _run(*self.command(*words))

    def cut(self) -> None:
        """Let nothing through between this host and the others; both ends see a link that is up."""
        _run("ip", "-n", self._network.switch, "link", "set", self._port, "nomaster")

    def heal(self) -> None:
        """Undo `cut`."""
        _run("ip", "-n", self._network.switch, "link", "set", self._port, "master", "bridge")

    def limit(self, rate: str) -> None:
        """Let so much through in each direction, as tc writes it: `1gbit`."""
        words = ("tbf", "rate", rate, "burst", "1mb", "latency", "100ms")
        for namespace, device in (
            (self._network.switch, self._port),
            (self.namespace, "eth0"),
        ):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *words)

    def carried(self) -> tuple[int, int]:
        """The bytes that came to this host, and those that went from it."""
        listed = _run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "eth0")
        (found,) = json.loads(listed.stdout)
        stats = found["stats64"]
        return stats["rx"]["bytes"], stats["tx"]["bytes"]


class Network:
    """That many hosts, `h0` and on; a context manager.

    With a `delay` (seconds, one way) or `loss` (of each frame, as a probability) the frames of each
    host go through a program that delays and loses them, as kernels need not have netem.
    """

    def __init__(self, hosts: int, *, delay: float = 0.0, loss: float = 0.0, seed: int = 0) -> None:
        _remove_forgotten()
        # Short, as are names of devices.
        self.prefix = f"{PREFIX}{os.getpid()}-{next(_numbers)}-"
        self.switch = f"{self.prefix}switch"
        self.started: list[subprocess.Popen[str]] = []
        self._wires: list[subprocess.Popen[bytes]] = []
        self.hosts = [Host(self, f"h{n}", f"10.77.0.{n + 1}") for n in range(hosts)]
        try:
            _run("ip", "netns", "add", self.switch)
            self._in_switch("link", "add", "name", "bridge", "type", "bridge")
            self._in_switch("link", "set", "bridge", "up")
            for number, host in enumerate(self.hosts):
                _run("ip", "netns", "add", host.namespace)
                if delay or loss:
                    self._wire(host, delay, loss, seed + number)
                else:
                    self._in_switch(
                        "link", "add", "name", host.name, "type", "veth",
                        "peer", "name", "eth0", "netns", host.namespace,
                    )  # fmt: skip
                self._in_switch("link", "set", host.name, "master", "bridge", "up")
                for device in ("eth0", "lo"):
                    _run("ip", "-n", host.namespace, "link", "set", device, "up")
                place = f"{host.address}/24"
                _run("ip", "-n", host.namespace, "addr", "add", place, "dev", "eth0")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started, and remove all. Idempotent."""
        everything: list[subprocess.Popen[Any]] = [*self.started, *self._wires]
        for program in everything:
            program.kill()
        for program in everything:
            program.communicate(timeout=LIMIT)
        self.started.clear()
        self._wires.clear()
        _remove(self.prefix)

    def know(self, names: dict[str, Host]) -> None:
        """Have programs that are started from now on, and those after the first time, find names.

        They see a file of names of their own, which is written anew in its place.
        """
        lines = [f"{host.address} {name}\n" for name, host in names.items()]
        for host in self.hosts:
            folder = FILES / host.namespace
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text("".join(["127.0.0.1 localhost\n", *lines]))

    def _in_switch(self, *words: str) -> None:
        _run("ip", "-n", self.switch, *words)

    def _wire(self, host: Host, delay: float, loss: float, seed: int) -> None:
        program = Path(__file__).with_name("delayed.py")
        words = [sys.executable, str(program), host.name, str(delay), str(loss), str(seed)]
        wire = subprocess.Popen(
            ["ip", "netns", "exec", self.switch, *words], stdout=subprocess.PIPE
        )
        self._wires.append(wire)
        assert wire.stdout is not None
        assert wire.stdout.readline() == b"ready\n"
        self._in_switch("link", "set", f"{host.name}-far", "netns", host.namespace)
        _run("ip", "-n", host.namespace, "link", "set", f"{host.name}-far", "name", "eth0")


def _run(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)
    return done


def _names() -> Sequence[str]:
    with suppress(OSError):
        return [name for name in os.listdir("/run/netns") if name.startswith(PREFIX)]
    return []


def _remove(prefix: str) -> None:
    for name in _names():
        if not name.startswith(prefix):
            continue
        # Also what the started programs have started.
        for pid in _run("ip", "netns", "pids", name, check=False).stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name, check=False)
        shutil.rmtree(FILES / name, ignore_errors=True)


def _remove_forgotten() -> None:
    for name in _names():
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not os.path.exists(f"/proc/{owner}"):
            _remove(f"{PREFIX}{owner}-")


needs_namespaces = pytest.mark.skipif(bool(lacking()), reason=lacking())
needs_wires = pytest.mark.skipif(
    bool(lacking()) or not os.path.exists("/dev/net/tun"),
    reason=lacking() or "delay and loss need /dev/net/tun",
)
