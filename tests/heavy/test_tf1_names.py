"""docs/tf1.md leaves no name of TensorFlow's distributed interface out, and makes none up."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest
from pages import ROOT

# All of these modules.
WHOLE = ("train", "queue", "distribute.cluster_resolver", "distribute.experimental")
# What of the module `tf` itself has to do with sessions, sharing, waiting.
PARTS = (
    r"Session|(?<!Sparse)Queue|Reader$|ReaderBase|Accumulator|^device$|DeviceSpec|^container$|Config"
    r"Proto|partition|report_uninit|variables?_initialize|^Variable$|get_variable|^assign|get_default"
    r"|session_(handle|tensor)|^GraphKeys|^Graph$|tables|^(all|local|global|model|trainable)_var"
)
# Names of a part that have nothing to do with it: graphs, logs, constants.
ELSEWHERE = {"SessionLog", "dynamic_partition"}

LISTING = """
import json, sys
import tensorflow.compat.v1 as tf
def names(path):
    found = tf
    for word in path.split("."):
        found = getattr(found, word)
    return [n for n in dir(found) if not n.startswith("_")]
print(json.dumps({path: names(path) for path in sys.argv[1:]} | {"": dir(tf)}))
"""

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="needs tensorflow, of any version 2"
    ),
]


@pytest.fixture(scope="module")
def names() -> dict[str, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", LISTING, *WHOLE, "errors"],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_no_name_is_left_out(names: dict[str, list[str]]) -> None:
    text = (ROOT / "docs" / "tf1.md").read_text()
    wanted = [name for module in WHOLE for name in names[module]]
    wanted += [name for name in names["errors"] if name.endswith("Error") and name != "OpError"]
    wanted += [n for n in names[""] if re.search(PARTS, n) and n not in ELSEWHERE]
    assert len(wanted) > 200
    assert [name for name in wanted if not re.search(rf"\b{name}\b", text)] == []


def test_no_name_is_made_up(names: dict[str, list[str]]) -> None:
    text = (ROOT / "docs" / "tf1.md").read_text()
    made_up = []
    for module, name in re.findall(r"`tf\.((?:[a-z_]+\.)*)(\w+)", text):
        known = names.get(module.rstrip("."))
        if known is not None and name not in known:
            made_up.append(f"tf.{module}{name}")
    # TensorFlow 2 has left out of its version 1 interface what it removed.
    assert made_up == []
