"""Servers that die while their cluster is being launched."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clusters import LIMIT, following, quiet

import paceline
from paceline.connection import Connection
from paceline.core import messages as m
from paceline.hosting.launched import Launched

ENDED = "^the server, ps:1, was killed by SIGKILL: it ended while the cluster was launched"

pytestmark = pytest.mark.timeout(120)


@contextmanager
def dying(moment: str, task: str, times: int) -> Iterator[list[int]]:
    """Let a server die at that moment of a launch, so many times; the processes that it had."""
    killed: list[int] = []

    def kill(hosting: Launched) -> None:
        pid = hosting.processes().get(task)
        if pid is not None and pid not in killed and len(killed) < times:
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        if moment == "starting":
            for name in ("start", "anew"):
                patch.setattr(Launched, name, _then(getattr(Launched, name), kill))
        elif moment == "joined":
            patch.setattr(Launched, "chief", _then(Launched.chief, kill))
        else:
            there: list[Launched] = []
            patch.setattr(Launched, "chief", _then(Launched.chief, there.append))
            call = Connection.call

            def calls(self: Connection, request: Any, *more: Any, **options: Any) -> Any:
                if there and isinstance(request, m.Revive):
                    kill(there[-1])
                return call(self, request, *more, **options)

            patch.setattr(Connection, "call", calls)
        yield killed


def _then(method: Callable[..., Any], after: Callable[[Any], object]) -> Callable[..., Any]:
    def both(self: Any, *args: Any, **options: Any) -> Any:
        found = method(self, *args, **options)
        after(self)
        return found

    return both


@pytest.mark.parametrize(
    ("moment", "task"),
    [
        ("starting", "ps:1"),
        ("joined", "ps:0"),
        ("restoring", "ps:1"),
        pytest.param("starting", "ps:0", marks=pytest.mark.slow),
        pytest.param("joined", "ps:1", marks=pytest.mark.slow),
        pytest.param("restoring", "ps:0", marks=pytest.mark.slow),
    ],
)
def test_one_that_dies_while_the_cluster_is_launched_is_started_again(
    moment: str, task: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with quiet(1, ps=2, checkpoint=tmp_path) as cluster:
        for at, name in (("ps:0", "one"), ("ps:1", "two")):
            with cluster.session.device(at):
                cluster.variable(name, np.ones(2))
                cluster.queue(f"q of {name}", 4).enqueue(3)
        before = cluster.variable("one").version
    with dying(moment, task, 2) as killed, quiet(1, ps=2, checkpoint=tmp_path) as cluster:
        assert len(set(killed)) == 2
        for name in ("one", "two"):
            assert cluster.variable(name).read().tree.tolist() == [1, 1]
            # It is the whole cluster that began again.
            assert cluster.queue(f"q of {name}").dequeue(timeout=0) == 3
        policy = cluster.variable("one")
        assert policy.version > before
        cluster.collect(following, policy, batch_size=1).next(timeout=LIMIT)
    assert (
        f"the server, {task}, was killed by SIGKILL, while the cluster was launched" in caplog.text
    )


@pytest.mark.parametrize(
    ("moment", "folder", "restarts", "times", "said"),
    [
        ("starting", False, 3, 1, "$"),
        pytest.param(
            "starting",
            True,
            1,
            2,
            ", as servers did 2 times; the budget is restarts=1$",
            marks=pytest.mark.slow,
        ),
        ("joined", True, 1, 2, ", as servers did 2 times; the budget is restarts=1$"),
    ],
)
def test_a_launch_ends_with_one_error_that_names_the_server(
    moment: str, folder: bool, restarts: int, times: int, said: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"restarts": restarts}
    if folder:
        options["checkpoint"] = tmp_path
        with quiet(1, **options) as cluster:
            cluster.variable("w", 1)
    with (
        dying(moment, "ps:1", times) as killed,
        pytest.raises(paceline.Disconnected, match=ENDED + said),
    ):
        quiet(1, ps=2, **options)
    assert len(killed) == times
