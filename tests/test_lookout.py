"""Servers that die while nobody asks them anything."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clusters import until
from hands import cluster, served
from spreads import SECRET, Servers

import paceline
from paceline import lookout


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookout, "EVERY", 0.01)


@pytest.fixture(params=["unix", "tcp"])
def servers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path, request.param, 2)
    try:
        yield made
    finally:
        made.close()


def test_a_server_is_told_to_be_gone_and_back_once_where_nobody_asks_it(
    servers: Servers, caplog: pytest.LogCaptureFixture
) -> None:
    session = servers.session()
    known = session.lines.all[1].where
    servers.end(1)
    until(lambda: f"worker:0: the server {known} is gone: " in caplog.text)
    servers.start(1)
    until(lambda: f"worker:0: the server {known} is back, after " in caplog.text)
    # So it knows whom it has to wait for.
    assert "worker:0 is here" in servers.running[1].told()
    assert len(caplog.messages) == 2


def test_a_server_that_somebody_else_found_again_is_told_too(
    servers: Servers, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookout, "EVERY", 60.0)
    lines = servers.session().lines
    seen: Any = {}
    assert lookout._looked(lines, "worker:0", seen, {})
    before = lines.all[1]
    servers.end(1)
    servers.start(1)
    until(lambda: lines.again()[1] is not before)
    for _ in range(2):
        assert lookout._looked(lines, "worker:0", seen, {})
    assert caplog.messages == [f"worker:0: the server {before.where} was started again"]


@pytest.mark.parametrize("carrier", ["unix", "tcp"])
def test_nobody_is_gone_where_the_cluster_is_done(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, carrier: str
) -> None:
    spec = cluster(tmp_path, carrier, ps=2, chief=1, worker=1)
    with served(spec, secret=SECRET) as running:
        with (
            paceline.Session(spec, secret=SECRET, job="worker", index=0) as idle,
            paceline.Session(spec, secret=SECRET, job="chief", index=0) as chief,
        ):
            chief.close()
            for server in running:
                server.join(30)
                server.close()
            until(lambda: not lookouts())
            assert not idle.lines.alive()
    assert "is gone" not in caplog.text


def lookouts() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == "paceline-lookout"]
