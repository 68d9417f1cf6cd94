"""Checkpoints: whole or not there, refused by name when they are damaged, and never unpickled."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from clusters import until
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from paceline import checkpoints
from paceline.checkpoints import CheckpointError, Contents, Saved, latest
from paceline.core import manifest as manifests
from paceline.core.bfloat16 import bfloat16
from paceline.core.errors import SchemaError, TimedOut
from paceline.core.tree import flatten
from paceline.testing import full_disk

TREE: Any = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "half": np.arange(3).astype(bfloat16()),
    "parts": [np.empty((0, 4)), (np.array(7), {1: None, "1": True})],
    "plain": [1, -(1 << 63), 0.1, math.inf, -0.0, "ü", b"\x00\xff", np.array([1j])],
    "odd": [np.array(["2020-01-01"], "M8[D]"), np.arange(3, dtype=">i4"), np.array([b"ab"])],
}


def same(one: Any, other: Any) -> bool:
    """Whether two trees have the same layout, values and bytes."""
    a, b = flatten(one), flatten(other)
    return (a.layout, repr(a.values)) == (b.layout, repr(b.values)) and [
        x.tobytes() for x in a.arrays
    ] == [x.tobytes() for x in b.arrays]


def save(folder: Path, step: int, variables: dict[str, Saved], **options: Any) -> Path:
    return checkpoints.save(folder, step, {"": Contents(variables)}, **options)


def at(folder: Path, step: int, **options: Any) -> Path:
    return save(folder, step, {"v": Saved(step, np.full(100, float(step)))}, **options)


def newest(folder: Path) -> int:
    found = latest(folder)
    assert found is not None
    assert found.read("v")[0] == found.manifest.step
    return found.manifest.step


def test_every_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    save(tmp_path, 3, {"a": Saved((5 << 31) + 7, TREE, 1 << 20), "b/..": Saved(1, np.zeros(2))})
    found = latest(tmp_path)
    assert found is not None
    assert same(found.read("a"), TREE)
    assert same(found.read("b/.."), np.zeros(2))
    entry = found.manifest.of().variables["a"]
    assert (entry.version, entry.epoch, entry.bound) == ((5 << 31) + 7, 5, 1 << 20)
    assert found.read("a")["w"].flags.writeable


arrays = hnp.arrays(
    hnp.scalar_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)


@given(
    st.recursive(
        arrays | plain,
        lambda part: (
            st.lists(part, max_size=3)
            | st.tuples(part)
            | st.dictionaries(st.text("a.0", max_size=3) | st.integers(0, 1), part, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_any_tree_comes_back_from_a_manifest_and_a_file(tree: Any) -> None:
    flat = flatten(tree)
    head, order = manifests.tensor_header(flat.layout)
    content = head + b"".join(flat.arrays[i].tobytes() for i in order)
    views = manifests.tensors(flat.layout, np.frombuffer(content, np.uint8))
    assert [x.tobytes() for x in views] == [x.tobytes() for x in flat.arrays]
    structure, leaves = manifests.described(flat.layout)
    entry = manifests.VariableEntry(
        1, 0, None, structure, leaves, manifests.spelled(flat.layout, flat.values), "f"
    )
    text = msgspec.json.encode(entry)
    again = msgspec.json.decode(text, type=manifests.VariableEntry)
    assert again.layout() == flat.layout
    assert repr(manifests.plain_values(again.layout(), again.values)) == repr([*flat.values])


def test_the_library_of_the_format_reads_the_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    tree = {"fc.weight": np.arange(6.0).reshape(2, 3), "n": np.array(3), "b": np.ones(3, bool)}
    path = save(tmp_path, 1, {"v": Saved(1, tree)})
    read = library.load_file(path / "variable-0000.safetensors")
    assert sorted(read) == ["b", "fc.weight", "n"]
    assert all(np.array_equal(read[name], array) for name, array in tree.items())


def test_the_newest_ones_stay_and_the_order_of_writing_counts(tmp_path: Path) -> None:
    for step in (5, 9, 9, 2):
        at(tmp_path, step, keep=3)
    names = [path.name for _, path in checkpoints.found(tmp_path)]
    assert names == [f"checkpoint-00000{n}-step-{s}" for n, s in ((2, 9), (3, 9), (4, 2))]
    assert newest(tmp_path) == 2


def cut(path: Path) -> None:
    os.truncate(path / "variable-0000.safetensors", 10)


def flip(path: Path) -> None:
    file = path / "variable-0000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def other(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        told = json.loads((path / "manifest.json").read_text())
        change(told)
        (path / "manifest.json").write_text(json.dumps(told))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "variable-0000.safetensors has 10 bytes, its manifest says "),
        (flip, "variable-0000.safetensors has another content than its digest says"),
        (lambda path: (path / "variable-0000.safetensors").unlink(), "No such file"),
        (lambda path: (path / "manifest.json").unlink(), "No such file"),
        (lambda path: os.truncate(path / "manifest.json", 40), "its manifest is malformed: "),
        (other(lambda told: told.update(format=5)), "its format is 5, written by paceline "),
        (other(lambda told: told.pop("step")), "its manifest is malformed: .*`step`"),
        (other(lambda told: told["files"].clear()), "variable 'v' is in 'variable-0000"),
        (
            other(lambda told: told["files"].update({"../x": {"size": 0, "sha256": ""}})),
            "its manifest names the file '../x', which is not beside it",
        ),
        (
            other(lambda told: told["containers"][""]["variables"]["v"].update(values=[1])),
            "variable 'v' has 0 plain leaves and 1 values",
        ),
        (
            other(lambda told: told["containers"][""]["variables"]["v"].update(structure=["x"])),
            "bytes are not a layout",
        ),
        (
            other(lambda told: told["files"].update({"a\0": {"size": 0, "sha256": ""}})),
            r"its manifest names the file 'a\\x00', which is not beside it",
        ),
        (
            other(lambda told: told["containers"][""]["variables"]["v"].update(epoch=7)),
            r"variable 'v' has version \d+, none of epoch 7",
        ),
        (
            other(
                lambda told: told["containers"][""]["variables"]["v"].update(version=-1, epoch=-1)
            ),
            "variable 'v' has version -1, of -1 so far",
        ),
        (
            other(lambda told: told["containers"][""]["variables"]["v"].update(bound=0)),
            "variable 'v' has a bound of 0 bytes",
        ),
        (
            other(
                lambda told: told["containers"][""].update(
                    counters={"c": {"start": 0, "value": 1 << 63}}
                )
            ),
            r"counter 'c' has 9223372036854775808, of more than 64 bits",
        ),
    ],
)
def test_a_damaged_one_is_refused_by_name_and_the_one_before_is_used(
    tmp_path: Path, caplog: Any, damage: Callable[[Path], None], said: str
) -> None:
    at(tmp_path, 1)
    damaged = at(tmp_path, 2)
    damage(damaged)
    assert newest(tmp_path) == 1
    (record,) = caplog.records
    assert damaged.name in record.getMessage()
    assert re.search(said, record.getMessage())


def test_a_manifest_with_one_bit_changed_is_refused(tmp_path: Path) -> None:
    """Also where it is a manifest still, of another number."""
    path = at(tmp_path, 1) / "manifest.json"
    whole = path.read_bytes()
    random = Random(0)
    for _ in range(300):
        content = bytearray(whole)
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
        path.write_bytes(content)
        with pytest.raises(
            CheckpointError, match=r"^no checkpoint in .* is good: checkpoint-000001-step-1: "
        ):
            latest(tmp_path)
    path.write_bytes(whole.replace(b'"step": 1', b'"step": 9'))
    with pytest.raises(
        CheckpointError, match=r": manifest\.json has another content than manifest\.json\.sha256 "
    ):
        latest(tmp_path)
    # Those written before its digest was.
    (path.parent / "manifest.json.sha256").unlink()
    found = latest(tmp_path)
    assert found is not None
    assert found.manifest.step == 9


def test_if_none_is_good_the_error_has_each_and_why(tmp_path: Path) -> None:
    assert latest(tmp_path / "not there") is None
    cut(at(tmp_path, 1))
    flip(at(tmp_path, 2))
    with pytest.raises(
        CheckpointError, match=r"^no checkpoint in .* is good: .*-step-2: .* digest says; .*-step-1"
    ):
        latest(tmp_path)


def test_a_full_disk_leaves_the_old_one_and_says_what_was_needed(tmp_path: Path) -> None:
    at(tmp_path, 1)
    with (
        full_disk(100_000),
        pytest.raises(
            CheckpointError,
            match=r"^checkpoint of step 2 in .*: .*File too large.* variables take 800000 bytes; ",
        ),
    ):
        save(tmp_path, 2, {"v": Saved(2, np.zeros(100_000))})
    assert sorted(os.listdir(tmp_path)) == [".lock", "checkpoint-000001-step-1"]
    assert newest(tmp_path) == 1


WRITER = """
import sys, time
from paceline import disk
from pathlib import Path
root = Path(sys.argv[1])
with disk.locked(root, 1.0):
    (root / ".writing").mkdir()
    (root / ".writing" / "half").write_text("half")
    print("writes", flush=True)
    sys.stdin.read()
"""


def test_what_a_dead_writer_left_is_removed_and_never_a_living_ones(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writes\n"
        with pytest.raises(TimedOut, match=r"^write a checkpoint in .*, after 0.1 s: another pro"):
            at(tmp_path, 1, timeout=0.1)
        assert (tmp_path / ".writing" / "half").exists()
        writer.kill()
    until(lambda: writer.poll() is not None)
    at(tmp_path, 1)
    assert not (tmp_path / ".writing").exists()
    assert newest(tmp_path) == 1


def test_a_variable_that_changed_since_it_was_checked_is_refused(tmp_path: Path) -> None:
    path = at(tmp_path, 1)
    found = latest(tmp_path)
    assert found is not None
    flip(path)
    with pytest.raises(CheckpointError, match=r"^variable 'v' of .*: variable-0000.* digest says$"):
        found.read("v")


def test_a_file_of_another_layout_is_refused() -> None:
    layout = flatten({"a": np.zeros(2)}).layout
    with pytest.raises(SchemaError, match=r"^its arrays are not those"):
        manifests.tensors(layout, np.zeros(9, np.uint8))
