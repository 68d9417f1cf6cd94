"""When a cluster is done, who belongs to it, and where names are at home: the pure state."""

import re
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from paceline.core.cluster_state import ClusterState, Phase
from paceline.core.errors import Refused, UnknownName
from paceline.core.spec import Spec, Task
from paceline.core.waiting import NOT_YET

CLUSTER = {"ps": ["a:1", "a:2"], "chief": ["a:3"], "worker": ["a:4", "a:5"]}
SERVERS = [Task("ps", 0), Task("ps", 1)]
CHIEF, FIRST, SECOND = Task("chief", 0), Task("worker", 0), Task("worker", 1)


def cluster(spec: dict[str, Any] | None = None) -> ClusterState:
    return ClusterState(Spec(spec or CLUSTER), SERVERS[: 2 if spec is None else 1], SERVERS[0])


def far(state: ClusterState) -> Phase:
    return state.phase


def test_it_is_done_when_all_have_come_and_said_goodbye() -> None:
    state = cluster({"ps": ["a:1"], "worker": ["a:4", "a:5"]})
    assert far(state) is Phase.RUNNING
    state.joined(FIRST)
    state.gone(FIRST, goodbye=True)
    assert (state.phase, state.missing()) == (Phase.RUNNING, [SECOND])
    state.joined(SECOND)
    state.gone(SECOND, goodbye=False)
    assert (state.phase, state.missing()) == (Phase.RUNNING, [SECOND])
    state.joined(SECOND)
    assert far(state) is Phase.RUNNING
    state.gone(SECOND, goodbye=True)
    assert far(state) is Phase.DONE


def test_a_chiefs_goodbye_stops_it_and_its_death_does_not() -> None:
    state = cluster()
    for task in (CHIEF, FIRST, SECOND):
        state.joined(task)
    state.gone(CHIEF, goodbye=False)
    assert (state.phase, state.reason) == (Phase.RUNNING, None)
    state.joined(CHIEF)
    state.gone(CHIEF, goodbye=True)
    assert (state.phase, state.reason) == (Phase.ENDING, "chief:0 has left")
    state.gone(FIRST, goodbye=True)
    state.gone(SECOND, goodbye=False)
    assert far(state) is Phase.DONE


def test_a_chief_that_comes_back_goes_on() -> None:
    state = cluster()
    for task in (CHIEF, FIRST):
        state.joined(task)
    state.gone(CHIEF, goodbye=True)
    state.joined(CHIEF)
    assert (state.phase, state.reason) == (Phase.RUNNING, None)


def test_asked_to_stop_it_waits_for_the_chief_to_leave() -> None:
    state = cluster()
    for task in (CHIEF, FIRST):
        state.joined(task)
    state.stop("worker:0 has seen enough")
    state.stop("another reason")
    assert (state.phase, state.reason) == (Phase.RUNNING, "worker:0 has seen enough")
    state.gone(CHIEF, goodbye=False)
    assert far(state) is Phase.ENDING
    state.joined(CHIEF)
    state.gone(CHIEF, goodbye=True)
    assert (state.phase, state.reason) == (Phase.ENDING, "worker:0 has seen enough")
    state.gone(FIRST, goodbye=True)
    assert far(state) is Phase.DONE


def test_without_a_spec_it_never_ends() -> None:
    state = ClusterState()
    state.joined(FIRST)
    state.stop("enough")
    state.gone(FIRST, goodbye=True)
    assert (state.phase, state.reason) == (Phase.RUNNING, "enough")


def test_who_is_no_task_of_it_is_refused_and_guests_are_not() -> None:
    state = cluster()
    state.admit(Task("session", -1), None, [])
    with pytest.raises(
        Refused, match=r"^no task worker:2 in the cluster; job 'worker' has \[0, 1\]$"
    ):
        state.admit(Task("worker", 2), None, [])
    with pytest.raises(
        Refused, match=r"^say which task of job 'worker' this is: index= one of \[0"
    ):
        state.admit(Task("worker", -1), None, [])


@pytest.mark.parametrize(
    ("given", "servers", "said"),
    [
        ({"ps": ["a:1", "a:9"]}, ["ps:0", "ps:1"], "ps:1 is at a:2 here, at a:9 there"),
        ({"x": ["a:1"]}, ["x:0"], "ps:0 is at a:1 here, missing there"),
        (CLUSTER, ["ps:0"], "servers are ps:0, ps:1 here, ps:0 there"),
    ],
)
def test_another_cluster_is_refused_with_the_first_difference(
    given: Any, servers: list[str], said: str
) -> None:
    said = f"the cluster that worker:0 was given is not the one of this server, ps:0: {said}; give"
    with pytest.raises(Refused, match=f"^{re.escape(said)}"):
        cluster().admit(
            FIRST, Spec({**CLUSTER, **given} if "ps" in given else given).numbered(), servers
        )


def test_what_is_no_cluster_is_refused() -> None:
    with pytest.raises(Refused, match=r"^worker:0 has no cluster: cluster\.ps: a job has at least"):
        cluster().admit(FIRST, {"ps": {}}, [])


def test_the_first_maker_decides_where_a_name_is_at_home() -> None:
    state = cluster()
    assert state.locate("variable", "v", "") is NOT_YET
    assert state.locate("variable", "v", "ps:1") == "ps:1"
    assert state.locate("variable", "v", "ps:0") == "ps:1"
    assert state.locate("variable", "v", "") == "ps:1"
    assert state.locate("queue", "v", "ps:0") == "ps:0"
    with pytest.raises(
        UnknownName, match=r"^queue 'q': worker:0 runs no server; there are \['ps:0'"
    ):
        state.locate("queue", "q", "worker:0")
    assert state.locate("queue", "q", "") is NOT_YET


TASKS = st.sampled_from([CHIEF, FIRST, SECOND])


class Beside(RuleBasedStateMachine):
    """A cluster beside a model that keeps, for each task, the last thing that it did."""

    def __init__(self) -> None:
        super().__init__()
        self.state = cluster()
        self.last: dict[Task, str] = {}
        self.asked = False

    @rule(task=TASKS)
    def join(self, task: Task) -> None:
        if self.last.get(task) != "here":
            self.state.joined(task)
            self.last[task] = "here"

    @rule(task=TASKS, how=st.sampled_from(["left", "died"]))
    def go(self, task: Task, how: str) -> None:
        if self.last.get(task) == "here":
            self.state.gone(task, goodbye=how == "left")
            self.last[task] = how

    @rule()
    def stop(self) -> None:
        self.state.stop("enough")
        self.asked = True

    @invariant()
    def it_is_as_far_as_the_model(self) -> None:
        here = [task for task in (CHIEF, FIRST, SECOND) if self.last.get(task) == "here"]
        all_left = all(self.last.get(task) == "left" for task in (CHIEF, FIRST, SECOND))
        stopped = self.asked or self.last.get(CHIEF) == "left"
        if all_left or (stopped and not here):
            wanted = Phase.DONE
        elif stopped and CHIEF not in here:
            wanted = Phase.ENDING
        else:
            wanted = Phase.RUNNING
        assert (self.state.phase, self.state.present()) == (wanted, here)


TestBeside = Beside.TestCase
TestBeside.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
