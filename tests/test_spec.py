"""A cluster's tasks: written by hand, read from files and from the environment."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import ClusterSpec, Refused, SchemaError, Server, Session, UnknownName
from paceline.core.cluster_state import ClusterState
from paceline.core.environment import expanded
from paceline.core.spec import Task, check_guest

CLUSTER: dict[str, Any] = {
    "ps": ["127.0.0.1:4032", "unix:/run/ps1"],
    "worker": {1: "host-a:1", 7: "[::1]:2"},
}


@pytest.mark.parametrize(
    ("job", "near"),
    [("wroker", "worker"), ("Worker", "worker"), ("workers", "worker"), ("cheif", "chief")],
)
def test_a_job_that_reads_like_one_of_the_cluster_is_no_guest(job: str, near: str) -> None:
    spec = ClusterSpec({"ps": ["a:1"], "chief": ["a:2"], "worker": ["a:3"]})
    others = [each for each in spec.jobs if each != near]
    listed = re.escape(f"no job {job!r} in the cluster; there are {[near, *others]}")
    with pytest.raises(UnknownName, match=f"^{listed}; a session that is none of them has no job,"):
        Session(spec, job=job, secret=b"s", timeout=0)
    with pytest.raises(UnknownName, match=f"^{listed}$"):
        spec.num_tasks(job)
    with pytest.raises(Refused, match=f"^{listed}; a session that is none of them has no job,"):
        ClusterState(spec).admit(Task(job, 0), None, [])


@pytest.mark.parametrize("job", ["session", "eval", "trainer", "worker.operations", "look"])
def test_a_job_of_another_name_is_a_guest(job: str) -> None:
    spec = ClusterSpec({"ps": ["a:1"], "evaluator": ["a:2"], "worker": ["a:3"], "lock": ["a:4"]})
    check_guest(spec, job)
    ClusterState(spec).admit(Task(job, -1), None, [])


def test_a_spec_knows_its_tasks_and_where_they_are() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec.jobs == ["ps", "worker"]
    assert (spec.num_tasks("ps"), spec.task_indices("worker")) == (2, [1, 7])
    assert spec.address("ps", 0) == "127.0.0.1:4032"
    assert [spec.target("ps", 1), spec.target("worker", 7)] == ["unix:/run/ps1", "tcp:[::1]:2"]
    assert spec.as_dict() == CLUSTER
    assert repr(spec) == "<ClusterSpec of ps: 2, worker: 2>"
    assert spec.task is None


def test_specs_are_equal_when_their_tasks_are() -> None:
    spec = ClusterSpec(CLUSTER)
    turned = ClusterSpec({"worker": {7: "[::1]:2", 1: "tcp:host-a:1"}, "ps": CLUSTER["ps"]})
    other = ClusterSpec({**CLUSTER, "ps": ["127.0.0.1:4033", "unix:/run/ps1"]})
    assert spec == turned == ClusterSpec(spec) == ClusterSpec(spec.as_dict())
    assert len({spec.digest, turned.digest}) == 1
    assert hash(spec) == hash(turned)
    assert spec != other
    assert spec.digest != other.digest
    assert spec != CLUSTER


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"ps": ["a:1", "b:2"]}, None),
        ({"ps": ["a:1"]}, "ps:1 is at b:2 here, missing there"),
        ({"ps": ["a:1", "b:3"]}, "ps:1 is at b:2 here, at b:3 there"),
        ({"ps": ["a:1", "b:2"], "w": ["c:3"]}, "w:0 is missing here, at c:3 there"),
    ],
)
def test_the_first_difference_of_two_specs_is_told(other: Any, said: str | None) -> None:
    assert ClusterSpec({"ps": ["a:1", "b:2"]}).difference(ClusterSpec(other)) == said


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({}, "a cluster is a dict of jobs with their tasks, not {}"),
        (["a:1"], "a cluster is a dict of jobs with their tasks, not ['a:1']"),
        ({"p s": ["a:1"]}, "cluster: a job has a name of 1 to 256 characters without blanks, "),
        ({"ps": []}, "cluster.ps: a job has at least one task"),
        ({"ps": "a:1"}, "cluster.ps: a job is a list of addresses, or a dict of them by task num"),
        ({"ps": {-1: "a:1"}}, "cluster.ps: a task's number is a whole number, 0 or more, not -1"),
        ({"ps": {"1": "a:1", 1: "b:1"}}, "cluster.ps: a task number is there twice: ['1', 1]"),
        ({"ps": ["a:1", "a"]}, "cluster.ps[1]: an address is 'host:port', with a port of 0 to 655"),
        ({"ps": ["a:65536"]}, "cluster.ps[0]: an address is 'host:port', with a port of 0 to 655"),
        ({"ps": [4032]}, "cluster.ps[0]: an address is 'host:port', with a port of 0 to 65535, or"),
        ({"ps": ["a:1"], "w": ["a:1"]}, "cluster: ps:0 and w:0 are both at a:1"),
    ],
)
def test_what_is_no_cluster_is_refused_with_what_was_found(cluster: Any, said: str) -> None:
    with pytest.raises(SchemaError, match=f"^{re.escape(said)}"):
        ClusterSpec(cluster)


def test_what_is_not_in_the_cluster_is_an_error_that_lists_what_is() -> None:
    spec = ClusterSpec(CLUSTER)
    with pytest.raises(UnknownName, match=r"^no job 'pz' in the cluster; there are \['ps', 'work"):
        spec.num_tasks("pz")
    with pytest.raises(UnknownName, match=r"^no task worker:0 in the cluster; job 'worker' has \["):
        spec.address("worker", 0)
    with pytest.raises(UnknownName, match=r"^no task worker:2 in the cluster; job 'worker' has \["):
        ClusterSpec(CLUSTER, task=("worker", 2))


@pytest.mark.parametrize(
    ("jobs", "chosen", "found"),
    [
        (["ps", "calculation", "worker"], None, ["ps:0"]),
        (["worker", "calculation", "chief"], None, ["calculation:0"]),
        (["ps", "chief"], ["chief", "ps:0"], ["chief:0", "ps:0"]),
        (["ps", "chief"], "chief", ["chief:0"]),
        (["ps", "chief"], ["/job:ps/task:0"], ["ps:0"]),
    ],
)
def test_which_tasks_run_servers(jobs: list[str], chosen: Any, found: list[str]) -> None:
    spec = ClusterSpec({job: [f"{job}:1"] for job in jobs})
    assert [str(task) for task in spec.servers(chosen)] == found


def test_a_cluster_where_no_task_runs_a_server_is_refused() -> None:
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["a:2"]})
    with pytest.raises(
        SchemaError, match=r"^no task of the jobs \['chief', 'worker'\] runs a serv"
    ):
        spec.servers()
    with pytest.raises(
        UnknownName, match=r"^no job 'ps' in the cluster; there are \['chief', 'wor"
    ):
        spec.servers(["ps"])


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("ps:1", ("ps", 1)),
        ("ps", ("ps", 0)),
        ("/job:ps/task:1", ("ps", 1)),
        ("/job:ps", ("ps", 0)),
        ("/job:ps/replica:0/task:12/device:CPU:0", ("ps", 12)),
    ],
)
def test_a_task_is_written_in_two_ways(text: str, task: tuple[str, int]) -> None:
    assert Task.parse(text) == task


@pytest.mark.parametrize(
    "text", ["", ":1", "ps:x", "ps:1:2", "/job:", "/job:ps/task:x", "a b:1", 3]
)
def test_what_is_no_task_is_refused(text: Any) -> None:
    with pytest.raises(SchemaError, match=r"^a task is "):
        Task.parse(text)


NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=8)
PORTS = st.integers(1, 65535)


@given(st.dictionaries(NAMES, st.dictionaries(st.integers(0, 99), PORTS, min_size=1), min_size=1))
def test_what_is_written_down_reads_as_the_same_cluster(tasks: dict[str, dict[int, int]]) -> None:
    places = iter(range(1 << 20))
    cluster = {
        job: {index: f"host{next(places)}:{port}" for index, port in numbered.items()}
        for job, numbered in tasks.items()
    }
    spec = ClusterSpec(cluster)
    environment = {"TF_CONFIG": json.dumps({"cluster": spec.as_dict()})}
    assert ClusterSpec.from_environment(environment) == spec == ClusterSpec(spec.as_dict())


def test_files_in_toml_and_json(tmp_path: Path) -> None:
    toml, jsn = tmp_path / "cluster.toml", tmp_path / "cluster.json"
    toml.write_text('[cluster]\nps = ["127.0.0.1:4032"]\nworker = {3 = "b:1"}\n')
    jsn.write_text(
        '{"cluster": {"ps": ["127.0.0.1:4032"], "worker": {"3": "b:1"}},'
        ' "task": {"type": "worker", "index": 3}}'
    )
    assert ClusterSpec.from_file(toml) == ClusterSpec.from_file(str(jsn))
    assert ClusterSpec.from_file(jsn).task == ("worker", 3)
    assert ClusterSpec.from_file(toml).task is None


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("[cluster\n")
    with pytest.raises(SchemaError, match=rf"^{re.escape(str(path))} is not TOML: "):
        ClusterSpec.from_file(path)
    path.write_text('[cluster]\nps = "a:1"\n')
    with pytest.raises(
        SchemaError, match=rf"^{re.escape(str(path))}: cluster\.ps: a job is a list"
    ):
        ClusterSpec.from_file(path)
    with pytest.raises(FileNotFoundError):
        ClusterSpec.from_file(tmp_path / "none.toml")


TASK = '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": %s}'


def test_tf_config_says_cluster_and_task() -> None:
    told = {"TF_CONFIG": TASK % '{"type": "worker", "index": 0}', "SLURM_PROCID": "9"}
    spec = ClusterSpec.from_environment(told)
    assert (spec, spec.task) == (ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]}), ("worker", 0))
    assert ClusterSpec(spec).task == ("worker", 0)
    ours = {**told, "PACELINE_CLUSTER": '{"cluster": {"ps": ["c:1"]}}'}
    assert ClusterSpec.from_environment(ours).as_dict() == {"ps": ["c:1"]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "TF_CONFIG is not JSON: "),
        ("[]", "TF_CONFIG: the field 'cluster' is missing; found []"),
        ('{"task": 1}', "TF_CONFIG: the field 'cluster' is missing; found ['task']"),
        ('{"cluster": {"ps": "a:1"}}', "TF_CONFIG: cluster.ps: a job is a list of addresses, "),
        (
            '{"sparseCluster": {"ps": [], "worker": {"1": "b:1"}}}',
            "TF_CONFIG: the field 'sparseCluster' has a part of the cluster, another one in each"
            " process: all need the whole one (in a TFJob, enableDynamicWorker: false)",
        ),
        (TASK % "[]", 'TF_CONFIG: task: it is {"type": job, "index": number}, not []'),
        (TASK % '{"index": 0}', "TF_CONFIG: task.type: a job's name is a text, not None"),
        (TASK % '{"type": "ps", "index": "x"}', "TF_CONFIG: task.index: it is a whole number, not"),
        (
            TASK % '{"type": "ps", "index": 2}',
            "TF_CONFIG: task: ps:2 is not in the cluster, which has {'ps': [0], 'worker': [0]}",
        ),
    ],
)
def test_a_malformed_tf_config_is_an_error_with_the_field(text: str, said: str) -> None:
    with pytest.raises(SchemaError, match=f"^{re.escape(said)}"):
        ClusterSpec.from_environment({"TF_CONFIG": text})


OPERATOR = """{"cluster":{"ps":["dist-mnist-for-e2e-test-ps-0.kubeflow.svc:2222"],
"worker":["dist-mnist-for-e2e-test-worker-0.kubeflow.svc:2222",
"dist-mnist-for-e2e-test-worker-1.kubeflow.svc:2222"]},
"task":{"type":"%s","index":%d},"environment":"cloud"}"""


def test_tf_config_as_the_training_operator_documents_it() -> None:
    """https://www.kubeflow.org/docs/components/training/tftraining/, with one worker more."""
    spec = ClusterSpec.from_environment({"TF_CONFIG": OPERATOR % ("worker", 1)})
    assert (spec.task, spec.jobs) == (("worker", 1), ["ps", "worker"])
    assert spec.target("ps", 0) == "tcp:dist-mnist-for-e2e-test-ps-0.kubeflow.svc:2222"
    assert [*map(str, spec.servers())] == ["ps:0"]
    # An evaluator is told of the cluster, which does not have it.
    outside = ClusterSpec.from_environment({"TF_CONFIG": OPERATOR % ("evaluator", 0)})
    assert (outside.task, outside.difference(spec)) == (("evaluator", 0), None)


def test_an_evaluator_outside_of_the_cluster_opens_a_session(tmp_path: Path) -> None:
    spec = ClusterSpec({"ps": [f"unix:{tmp_path}/0"], "worker": ["b:1"]})
    with Server(spec, job_name="ps", secret=b"s" * 32):
        told = {"cluster": spec.as_dict(), "task": {"type": "evaluator", "index": 0}}
        mine = ClusterSpec.from_environment({"TF_CONFIG": json.dumps(told)})
        with Session(mine, secret=b"s" * 32) as session:
            assert session.task == "evaluator:0"
            assert session.variable("x", 3.0).read().tree == 3.0


def test_an_environment_without_a_cluster_is_an_error() -> None:
    with pytest.raises(SchemaError, match=r"^no cluster in the environment: neither TF_CONFIG nor"):
        ClusterSpec.from_environment({})


SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_JOB_NODELIST": "node[08-10]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_slurms_ranks_become_tasks_in_order() -> None:
    spec = ClusterSpec.from_environment(SLURM)
    assert spec.as_dict() == {
        "ps": ["node08:4032"],
        "chief": ["node08:4033"],
        "worker": ["node09:4032", "node09:4033", "node10:4032"],
    }
    assert spec.task == ("worker", 1)
    told = {**SLURM, "PACELINE_JOBS": "worker=*,ps=2", "PACELINE_PORT": "9000"}
    spec = ClusterSpec.from_environment(told)
    assert spec.as_dict()["ps"] == ["node09:9001", "node10:9000"]
    assert spec.task == ("ps", 0)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID is a whole number, not 'x'"),
        ({"SLURM_PROCID": "5"}, "SLURM_PROCID is 5, but the step has 5 tasks"),
        ({"SLURM_JOB_NODELIST": ""}, "Slurm's variables: SLURM_STEP_NODELIST and SLURM_JOB_NODEL"),
        ({"SLURM_JOB_NODELIST": "a[1-"}, "Slurm's node list is malformed: "),
        ({"SLURM_JOB_NODELIST": "a[1-x]"}, "Slurm's node list is malformed: '1-x' in 'a[1-x]'"),
        ({"SLURM_JOB_NODELIST": "a"}, "Slurm's variables: 1 nodes (a), but tasks per node for 3"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2x2"}, "SLURM_STEP_TASKS_PER_NODE is malformed: '2x2' in"),
        ({"PACELINE_JOBS": "ps"}, "PACELINE_JOBS is written 'ps=1,chief=1,worker=*'; found 'ps'"),
        ({"PACELINE_JOBS": "ps=9,w=*"}, "PACELINE_JOBS='ps=9,w=*' does not fit a step of 5 tasks"),
        ({"PACELINE_JOBS": "ps=*,w=*"}, "PACELINE_JOBS='ps=*,w=*' does not fit a step of 5 tasks"),
        ({"PACELINE_PORT": "a"}, "PACELINE_PORT is a whole number, not 'a'"),
    ],
)
def test_what_slurm_cannot_have_said_is_an_error(changed: dict[str, str], said: str) -> None:
    with pytest.raises(SchemaError, match=f"^{re.escape(said)}"):
        ClusterSpec.from_environment({**SLURM, **changed})


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b", ["a", "b"]),
        ("gpu[01-03,7],x", ["gpu01", "gpu02", "gpu03", "gpu7", "x"]),
        ("r[1-2]n[3-4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("n[099-101].site", ["n099.site", "n100.site", "n101.site"]),
    ],
)
def test_slurms_node_lists(text: str, nodes: list[str]) -> None:
    assert expanded(text) == nodes
