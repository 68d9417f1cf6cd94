"""A minute in native code that holds the interpreter lock is no death."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from clusters import quiet

SECONDS = 60


@pytest.mark.timeout(240)
def test_a_worker_in_native_code_for_a_minute_is_told_of_and_left_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def stuck(worker: Any) -> Iterator[Any]:
        pid, took = os.getpid(), 0.0
        while True:
            if worker.index == 0:
                began = time.monotonic()
                ctypes.PyDLL(None).sleep(SECONDS)  # holds the interpreter lock
                took = time.monotonic() - began
            yield {"pid": pid, "took": took, "index": worker.index}

    caplog.set_level(logging.WARNING, "paceline")
    others = 0
    with quiet(2, restarts=0) as cluster:
        batches = cluster.collect(stuck, batch_size=4, max_lag=None)
        while 0 not in (data := batches.next().data)["index"]:
            others += 1
        [place, *_] = np.flatnonzero(data["index"] == 0)
        assert cluster.processes()["worker:0"] == data["pid"][place]
        assert [worker.starts for worker in cluster.stats().workers] == [1, 1]
    assert SECONDS <= data["took"][place] < SECONDS + 5
    assert others > 100
    told = [text for text in caplog.messages if "worker:0 has said nothing for" in text]
    assert 2 <= len(told) <= 3
    assert all(" in stuck" in text for text in told)
