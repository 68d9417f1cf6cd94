"""A Ray cluster of several nodes, one of which dies in the middle."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")


@pytest.mark.timeout(240)
def test_training_goes_on_with_workers_placed_elsewhere_when_a_node_dies() -> None:
    program = Path(__file__).with_name("dying_node.py")
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"]
    stats = found["stats"]
    dropped = sum(stats["dropped"].values())
    assert stats["accepted"] == stats["delivered"] + dropped + stats["stored"]
    for by in found["moved"]:
        assert re.search(rf"worker:{by} was on the node \S+ \(\w+\), which", done.stderr)
