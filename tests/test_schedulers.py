"""Clusters whose tasks a scheduler starts: Slurm's step, and a TFJob of the training operator."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hands import ended, lines_until
from namespaces import Network, needs_namespaces

EXAMPLES = Path(__file__).parents[1] / "examples"
WEIGHTS = r"weights \[ 2\. -3\.\], loss of each \[([^]]+)\]"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The program that all tasks run, in a folder that all hosts see."""
    shutil.copy(EXAMPLES / "by_hand" / "train.py", tmp_path)
    return tmp_path


def environment(folder: Path, **more: str) -> dict[str, str]:
    """That of a task, with the folder's commands before all others."""
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PACELINE")}
    return {**kept, "HOME": str(folder), "PATH": path, "PYTHONUNBUFFERED": "1", **more}


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(120)
def test_slurms_script_starts_a_cluster_on_three_nodes_that_ends_by_itself(folder: Path) -> None:
    stand_in = folder / "srun"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/srun.py "$@"\n')
    stand_in.chmod(0o755)
    with Network(3) as network:
        network.know({f"node{n}": host for n, host in enumerate(network.hosts)})
        # As its head asks for, less what Slurm does with it.
        told = {
            "NAMESPACES": network.prefix, "SLURM_JOB_NUM_NODES": "3", "SLURM_NTASKS_PER_NODE": "2",
        }  # fmt: skip
        script = subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm" / "train.sbatch"), "train.py"],
            cwd=folder, env=environment(folder, **told), text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        network.started.append(script)
        out, _ = ended(script)
    found = re.search(WEIGHTS, out)
    assert found is not None, out
    assert len(found[1].split()) == 4
    done = re.findall(r"((?:chief|worker):\d) is done", out)  # several write at the same time
    assert sorted(done) == ["chief:0", *(f"worker:{n}" for n in range(4))]
    assert [*folder.glob("secret-*")] == []


def tf_config(kind: str, index: int, replicas: dict[str, int]) -> str:
    """What the training operator tells a replica of the job `paceline` in the namespace `team`.

    As in its documentation: https://www.kubeflow.org/docs/components/training/tftraining/
    """
    cluster = {
        job: [f"paceline-{job}-{n}.team.svc:2222" for n in range(count)]
        for job, count in replicas.items()
        if job != "evaluator"
    }
    task = {"type": kind, "index": index}
    return json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(120)
def test_a_tfjob_whose_names_are_known_late_and_workers_first(folder: Path) -> None:
    """Each container is a host; the names of pods are published once these are ready."""
    text = (EXAMPLES / "kubernetes" / "tfjob.yaml").read_text()
    kinds = [kind.lower() for kind in re.findall(r"^    ([A-Z]\w+):$", text, re.MULTILINE)]
    replicas = dict(zip(kinds, map(int, re.findall(r"replicas: (\d+)", text)), strict=True))
    commands = dict(zip(kinds, re.findall(r"command: (\[.+\])", text), strict=True))
    assert replicas == {"ps": 1, "chief": 1, "worker": 2}
    secret = folder / "secret"
    secret.write_text("s" * 32)
    secret.chmod(0o400)
    pods = [(kind, n) for kind in reversed(kinds) for n in range(replicas[kind])]
    with Network(len(pods)) as network:
        network.know({})
        started = {}
        for host, (kind, n) in zip(network.hosts, pods, strict=True):
            started[kind, n] = host.start(
                *json.loads(commands[kind]), cwd=folder,
                env=environment(
                    folder, PACELINE_SECRET_FILE=str(secret),
                    TF_CONFIG=tf_config(kind, n, replicas),
                ),
            )  # fmt: skip
        server = started["ps", 0]
        lines_until(server, "waits until its own name paceline-ps-0.team.svc is known", errors=True)
        assert all(each.poll() is None for each in started.values())
        network.know(
            {
                f"paceline-{kind}-{n}.team.svc": host
                for host, (kind, n) in zip(network.hosts, pods, strict=True)
            }
        )
        out, _ = ended(started["chief", 0])
        assert re.search(WEIGHTS, out), out
        for each in [*[*started.values()][:-2], server]:
            ended(each)
