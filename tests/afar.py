"""Somebody at the terminals of several hosts, with programs of one cluster on each of them."""

from __future__ import annotations

import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

from hands import Programs, toml
from namespaces import Host, Network

import paceline

PORT = 4032


class Afar:
    """A cluster whose tasks are on the hosts of a network: `where` has the host of each task.

    All hosts see one folder, with the spec, a secret and the programs; it is the user's home.
    """

    def __init__(
        self, folder: Path, network: Network, where: dict[str, list[int]], **programs: str
    ) -> None:
        self.folder = folder
        self.network = network
        self.where = where
        ports = itertools.count(PORT)
        self.spec = paceline.ClusterSpec(
            {
                job: [f"{network.hosts[n].address}:{next(ports)}" for n in hosts]
                for job, hosts in where.items()
            }
        )
        toml(self.spec, folder / "cluster.toml")
        self.secret = folder / "secret"
        self.secret.write_text("s" * 32)
        self.secret.chmod(0o600)
        for name, text in programs.items():
            (folder / f"{name}.py").write_text(text)
        self.started: Programs = []

    def paceline(
        self, host: Host, *words: str, stdin: int = subprocess.DEVNULL, **environment: str
    ) -> subprocess.Popen[str]:
        made = host.python(
            "-m", "paceline", *words, "--cluster", "cluster.toml", "--secret-file", "secret",
            cwd=self.folder, env=self._environment(environment), stdin=stdin,
        )  # fmt: skip
        self.started.append(made)
        return made

    def serve(self, index: int = 0, job: str = "ps") -> subprocess.Popen[str]:
        return self.paceline(self.host(job, index), "serve", "--job", job, "--task", str(index))

    def run(self, script: str, job: str, index: int, *more: str) -> subprocess.Popen[str]:
        words = ("run", script, *more, "--job", job, "--task", str(index))
        return self.paceline(self.host(job, index), *words)

    def script(self, host: Host, name: str, *words: str) -> subprocess.Popen[str]:
        """A program that is told of the secret alone."""
        return host.python(
            name, *words, cwd=self.folder,
            env=self._environment({"PACELINE_SECRET_FILE": str(self.secret)}),
        )  # fmt: skip

    def host(self, job: str, index: int) -> Host:
        return self.network.hosts[self.where[job][index]]

    def _environment(self, more: dict[str, Any]) -> dict[str, str]:
        kept = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE")}
        return {**kept, "HOME": str(self.folder), **more}
