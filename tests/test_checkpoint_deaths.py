"""Who is killed at any step of a save or of a restore: what is there then, and goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hands import PATIENCE

import paceline
from paceline import checkpoints
from paceline.core.versions import epoch_of
from paceline.testing import full_disk

DYING = """
import json, os, signal, sys
import paceline

WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}
folder, what = sys.argv[1:]
left = -1

def watch(event, arguments):
    global left
    if event in WATCHED and left >= 0:
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

sys.addaudithook(watch)

def saves():
    with paceline.Session() as session:
        session.restore(folder)
        session.variable("v", 0).assign(2)
        queue = session.queue("q", 3)
        if queue.size == 1:
            queue.enqueue("two")
        begin()
        session.save(folder, step=2, keep=1)

def restores():
    with paceline.Session() as session:
        begin()
        session.restore(folder)

def begin():
    global left
    left = step

step, ends = 0, []
while not ends or ends[-1]:
    step += 1
    pid = os.fork()
    if pid == 0:
        (saves if what == "save" else restores)()
        os._exit(0)
    ends.append(os.waitpid(pid, 0)[1])
    print(json.dumps({"killed": ends[-1] == signal.SIGKILL, "step": step}), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize("what", ["save", "restore"])
def test_whoever_is_killed_at_any_step_leaves_one_that_is_whole(tmp_path: Path, what: str) -> None:
    with paceline.Session() as session:
        session.variable("v", 1)
        session.queue("q", 3).enqueue("one")
        session.save(tmp_path, step=1)
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    steps, newest, epochs = 0, 1, [0]
    with subprocess.Popen(
        [sys.executable, "-u", script, tmp_path, what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as dying:  # fmt: skip
        assert dying.stdin is not None
        assert dying.stdout is not None
        for line in dying.stdout:
            steps += 1
            with paceline.Session() as session:
                found = session.restore(tmp_path)
                assert found is not None
                assert found.manifest.step >= newest
                newest = found.manifest.step
                snapshot = session.variable("v").read()
                assert snapshot.tree == newest
                assert session.queue("q").size == newest
                # Nobody else has had this epoch, whoever died in the midst of noting it.
                epochs.append(epoch_of(snapshot.version))
            if not json.loads(line)["killed"]:
                break
            dying.stdin.write("go on\n")
            dying.stdin.flush()
        dying.communicate(timeout=PATIENCE)
    assert dying.returncode == 0
    assert steps > (10 if what == "save" else 5)
    assert epochs == sorted(set(epochs))
    assert newest == (2 if what == "save" else 1)
    path = checkpoints.save(tmp_path, 3, {}, keep=1)
    there = {each.name for each in tmp_path.iterdir()}
    assert there <= {path.name, ".lock", "epoch", "dying.py", *there & pid_files(tmp_path)}


def pid_files(folder: Path) -> set[str]:
    """What processes left that died while they noted an epoch."""
    return {each.name for each in folder.glob(".epoch-*")}


def test_an_epoch_that_a_full_disk_has_no_room_for_is_noted_next_time(tmp_path: Path) -> None:
    with paceline.Session() as session:
        session.variable("v", 1)
        session.save(tmp_path)
    versions = []
    for full in (True, False, False):
        with paceline.Session() as session:
            if full:
                with full_disk():
                    session.restore(tmp_path)
                assert not (tmp_path / "epoch").exists()
            else:
                session.restore(tmp_path)
            versions.append(session.variable("v").version)
    assert versions[1] < versions[2]
    assert int((tmp_path / "epoch").read_text()) == epoch_of(versions[-1])
    assert not pid_files(tmp_path)


def test_what_another_of_the_same_number_left_does_not_keep_an_epoch_from_the_disk(
    tmp_path: Path,
) -> None:
    with paceline.Session() as session:
        session.variable("v", 1)
        session.save(tmp_path)
    (tmp_path / f".epoch-{os.getpid()}").touch()
    with paceline.Session() as session:
        session.restore(tmp_path)
        noted = int((tmp_path / "epoch").read_text())
        assert noted == epoch_of(session.variable("v").version)
    assert not pid_files(tmp_path)
