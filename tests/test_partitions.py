"""A host that cannot reach the others for a while: what each side does, and what is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from afar import Afar
from hands import ended, lines_until
from namespaces import Network, needs_namespaces

CUT_SECONDS = 10.0

TRAIN = """
import json
import time
from collections import Counter

import numpy as np
import paceline


def play(policy, worker):
    n = 0
    while True:
        policy.read()
        time.sleep(0.005)
        print("made", n, flush=True)
        yield {"by": worker.index, "n": n}
        n += 1


with paceline.Cluster.from_environment(seed=3, progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(2))
    made = {0: [], 1: []}
    said = since = time.monotonic()
    healed = False
    collection = cluster.collect(play, policy, batch_size=4)
    for batch in collection:
        policy.assign_add(np.ones(2))
        for by, n in zip(batch.data["by"].tolist(), batch.data["n"].tolist()):
            healed = healed or by == 0 and bool(made[0]) and time.monotonic() - since > 5
            since = time.monotonic() if by == 0 else since
            made[by].append(n)
        if time.monotonic() - said > 0.5 or healed:
            said = time.monotonic()
            print("counts", len(made[0]), len(made[1]), flush=True)
        if healed and time.monotonic() - since < 1 and len(made[0]) % 50 == 0:
            break
    if cluster.is_chief:
        for numbers in made.values():
            assert numbers == sorted(set(numbers)), numbers
        print(json.dumps({"made": {by: len(found) for by, found in made.items()},
                          "last": {by: found[-1] for by, found in made.items()},
                          "stats": collection.stats()}), flush=True)
"""


def counts(program: subprocess.Popen[str]) -> tuple[int, int]:
    """How many items of each worker there were, as the chief says it next."""
    _, zero, one = lines_until(program, "counts")[-1].split()
    return int(zero), int(one)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(180)
def test_a_host_is_cut_off_for_ten_seconds_and_nothing_is_lost(tmp_path: Path) -> None:
    where = {"ps": [0], "chief": [1], "worker": [2, 1]}
    with Network(3) as network:
        afar = Afar(tmp_path, network, where, train=TRAIN)
        server = afar.serve()
        workers = [afar.run("train.py", "worker", n) for n in (0, 1)]
        chief = afar.run("train.py", "chief", 0)
        while not all(counts(chief)):
            pass
        network.hosts[2].cut()
        began, before = time.monotonic(), counts(chief)
        # The other worker's items go on to be trained with.
        while time.monotonic() - began < CUT_SECONDS:
            now = counts(chief)
        assert now[1] - before[1] > 200
        assert now[0] - before[0] < 10
        network.hosts[2].heal()
        out, _ = ended(chief)
        took = time.monotonic() - began - CUT_SECONDS
        assert took < 30.0
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        stats = found["stats"]
        dropped = sum(stats["dropped"].values())
        assert stats["accepted"] == stats["delivered"] + dropped + stats["stored"]
        # Each has made every one of its items, in the process that it began with.
        for program in workers:
            ended(program)
        ended(server)
        sys.stdout.write(json.dumps({"seconds after healing": round(took, 1), **found}) + "\n")
