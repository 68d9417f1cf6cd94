"""Replicas: torch modules and NumPy trees that share parameters by the names of their leaves."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from calls import Call
from hands import cluster, ended, served, start, toml
from torch import nn

import paceline
from paceline import FunctionError, SchemaError, Session, TimedOut, replica_device_setter
from paceline.functions import dump, load
from paceline.testing import Serving

SHAPES = {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (1, 3), "2.bias": (1,)}


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))


def flat(value: float = 0.0) -> dict[str, Any]:
    """The same parameters as arrays by name."""
    return {name: np.full(shape, value, np.float32) for name, shape in SHAPES.items()}


def nested(value: float = 0.0) -> dict[str, Any]:
    """The same once more, as dicts in dicts."""
    found: dict[str, Any] = {}
    for name, array in reversed(flat(value).items()):
        layer, leaf = name.split(".")
        found.setdefault(layer, {})[leaf] = array
    return found


def contents(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.tolist() for name, tensor in module.state_dict().items()}


def filled(module: nn.Module, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in module.state_dict().values())


def test_the_first_initialises_and_later_ones_are_linked_and_stay_as_they_are(
    server: Serving,
) -> None:
    with server.session() as one, server.session() as two:
        first, second = net(), net()
        mine, theirs = one.replica("model", first), two.replica("model", second)
        before = contents(second)
        assert (mine.version, theirs.version) == (None, None)
        assert mine.variable.name == "model"
        assert [*mine.variable.read().tree] == sorted(SHAPES)
        assert contents(second) == before
        version = theirs.pull()
        assert contents(second) == contents(first)
        assert version == theirs.version == theirs.variable.version
        assert theirs.value is second


def test_names_agree_whatever_the_nesting(server: Serving) -> None:
    with server.session() as session:
        module, deep = net(), nested()
        torch_side = session.replica("model", module)
        numpy_side = session.replica("model", deep)
        weights = deep["0"]["weight"]
        numpy_side.pull()
        assert np.array_equal(weights, module.get_parameter("0.weight").detach().numpy())
        weights[:] = 7
        numpy_side.push()
        torch_side.pull()
        assert (module.get_parameter("0.weight") == 7).all()
        assert not (module.get_parameter("0.bias") == 7).any()


def test_a_pull_copies_nothing_when_nothing_changed() -> None:
    with Session() as session:
        module = net()
        replica = session.replica("model", module)
        version = replica.pull()
        tensors = [tensor._version for tensor in module.parameters()]
        assert replica.pull() == version
        assert [tensor._version for tensor in module.parameters()] == tensors
        with torch.no_grad():
            module.get_parameter("0.bias").add_(1)
        shared = replica.variable.read().tree["0.bias"].tolist()
        assert replica.pull() == version
        assert module.get_parameter("0.bias").tolist() == shared


def test_what_was_pushed_need_not_be_pulled() -> None:
    with Session() as session:
        module = net()
        replica = session.replica("model", module)
        version = replica.push()
        assert replica.version == version
        tensors = [tensor._version for tensor in module.parameters()]
        assert replica.pull() == version
        assert [tensor._version for tensor in module.parameters()] == tensors
        other = session.replica("model", nested(1)).push()
        assert replica.pull() == other
        assert filled(module, 1)


def test_gradients_of_several_add_up_and_what_has_none_stays(server: Serving) -> None:
    def add(session: Session) -> None:
        mine = session.replica("model", nested())
        for _ in range(20):
            mine.push({"0": {"bias": np.ones(3, np.float32)}}, op="add")

    with server.session() as one, server.session() as two:
        module = net()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        replica = one.replica("model", module)
        for call in [Call(add, session) for session in (one, two)]:
            call.outcome()
        module(torch.ones(1, 2)).sum().backward()
        delta = {name: p.grad for name, p in module.named_parameters()}
        replica.push(delta, op="add")
        replica.pull()
        assert module.get_parameter("0.bias").tolist() == [40, 40, 40]
        assert module.get_parameter("2.bias").tolist() == [1]
        assert module.get_parameter("2.weight").tolist() == [[0, 0, 0]]


def test_the_leaves_of_a_replica_are_what_it_would_push() -> None:
    with Session() as session:
        replica = session.replica("model", net(), names=lambda name: f"body.{name}")
        before = replica.leaves()
        assert [*before] == [f"body.{name}" for name in sorted(SHAPES)]
        with torch.no_grad():
            replica.value.get_parameter("0.bias").add_(2)
        step = {name: array - before[name] for name, array in replica.leaves().items()}
        replica.push(step, op="add")
        shared = replica.variable.read().tree
        assert shared["body.0.bias"].tolist() == replica.leaves()["body.0.bias"].tolist()
        assert np.array_equal(shared["body.2.bias"], before["body.2.bias"])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.emb.weight
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_tied_weights_buffers_and_ints_are_shared() -> None:
    with Session() as session:
        one, two = Tied(), Tied()
        one.norm(torch.randn(4, 3))
        mine, theirs = session.replica("tied", one), session.replica("tied", two)
        assert [*mine.variable.read().tree] == [
            "emb.weight",
            "mask",
            "norm.bias",
            "norm.num_batches_tracked",
            "norm.running_mean",
            "norm.running_var",
            "norm.weight",
        ]
        theirs.pull()
        assert contents(one) == contents(two)
        assert two.norm.num_batches_tracked == 1
        assert two.out.weight is two.emb.weight
        message = r"^assign_add: leaf \$\.mask is bool, which cannot be added$"
        with pytest.raises(SchemaError, match=message):
            mine.push({"emb.weight": torch.ones(5, 3)}, op="add")
        same = session.replica("some", one, names=lambda name: None if name == "mask" else name)
        same.push({"norm.num_batches_tracked": np.array(4)}, op="add")
        same.pull()
        assert one.norm.num_batches_tracked == 5


def test_a_state_dict_with_tied_weights_is_pushed() -> None:
    with Session() as session:
        net = Tied()
        replica = session.replica("tied", net, names=lambda name: f"net.{name}")
        with torch.no_grad():
            net.emb.weight.fill_(5)
        state = net.state_dict()
        assert "out.weight" in state
        for tree in (
            {name: tensor for name, tensor in state.items() if name != "emb.weight"},
            {name: tensor.clone() for name, tensor in state.items()},
            state,
        ):
            replica.variable.assign({**replica.leaves(), "net.emb.weight": np.zeros((5, 3), "f4")})
            replica.push(tree)
            assert (replica.variable.read().tree["net.emb.weight"] == 5).all()
        with pytest.raises(SchemaError, match=r"'out\.weight' is tied"):
            replica.push({**state, "out.weight": 5})
        other = {**state, "out.weight": torch.zeros(5, 3)}
        message = (
            r"^push 'tied': 'out\.weight' is tied to 'emb\.weight', and the tree has other val"
        )
        with pytest.raises(SchemaError, match=message):
            replica.push(other)


@dataclass
class Settings:
    rate: float
    steps: int
    note: str
    nothing: None


def test_plain_values_come_in_a_new_tree() -> None:
    with Session() as session:
        first = Settings(0.5, 3, "a", None)
        own: dict[str, Any] = {"settings": first, "w": np.zeros(2)}
        other: dict[str, Any] = {"settings": Settings(0.0, 0, "", None), "w": np.ones(2)}
        mine, theirs = session.replica("s", own), session.replica("s", other)
        theirs.pull()
        assert theirs.value["settings"] == first
        assert theirs.value["w"].tolist() == [0, 0]
        theirs.value["w"][:] = 9
        assert mine.variable.read().tree["w"].tolist() == [0, 0]
        mine.push({"w": np.ones(2), "settings": {"steps": 2, "rate": 0.25}}, op="add")
        theirs.pull()
        assert theirs.value["settings"] == Settings(0.75, 5, "a", None)
        theirs.value = dict[str, Any](settings=Settings(1.0, 1, "b", None), w=np.full(2, 5.0))
        theirs.push()
        mine.pull()
        assert mine.value["settings"] == Settings(1.0, 1, "b", None)
        assert mine.value["w"].tolist() == [5, 5]


def test_names_are_changed_on_one_side_by_a_dict_or_a_function() -> None:
    with Session() as session:
        module = net()
        mine = session.replica("model", module, names=lambda name: f"body.{name}")
        assert [*mine.variable.read().tree] == [f"body.{name}" for name in sorted(SHAPES)]
        own: dict[str, Any] = {"body": nested(), "scratch": np.full(2, 8.0)}
        theirs = session.replica("model", own, names={"scratch": None})
        theirs.pull()
        assert own["scratch"].tolist() == [8, 8]
        assert own["body"]["2"]["bias"].tolist() == module.get_parameter("2.bias").tolist()
        with pytest.raises(SchemaError, match=r"^push 'model': some names are shared, some its ow"):
            mine.push({"0.bias": torch.ones(3), "body.2.bias": torch.ones(1)}, op="add")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"0.wait": "x"}, r"names: the model has no leaf '0\.wait'; it has \['0\.weight', "),
        ({"0.weight": "0.bias"}, r"names: two leaves become '0\.bias'$"),
        (lambda name: 3, r"names: '0\.weight' becomes 3; a name is a text, or None$"),
        (lambda name: "", r"names: '0\.weight' becomes ''; a name is a text, or None$"),
    ],
)
def test_names_that_cannot_be_are_refused(names: Any, message: str) -> None:
    with Session() as session:
        with pytest.raises(SchemaError, match=rf"^replica 'model': {message}"):
            session.replica("model", net(), names=names)
        assert session.resources()["variables"] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"2.weight": np.zeros((3, 1), np.float32)},
            r"leaf \$\['2\.weight'\] is float32\[3,1\], declared float32\[1,3\]$",
        ),
        (
            {"0.bias": np.zeros(3)},
            r"leaf \$\['0\.bias'\] is float64\[3\], declared float32\[3\]$",
        ),
        ({"0.bias": None}, r"leaf \$\['0\.bias'\] is missing, declared float32\[3\]$"),
        ({"3.bias": np.zeros(3)}, r"leaf \$\['3\.bias'\] is float64\[3\], not declared at all$"),
    ],
)
def test_a_model_that_differs_is_told_by_its_first_odd_leaf(
    server: Serving, change: dict[str, Any], message: str
) -> None:
    with server.session() as session:
        session.replica("model", net())
        for overwrite in (False, True):
            with pytest.raises(SchemaError, match=message) as raised:
                session.replica("model", {**flat(), **change}, overwrite=overwrite)
            assert overwrite or str(raised.value).startswith("replica 'model': leaf ")


def test_models_that_are_none_and_leaves_of_one_name_are_refused() -> None:
    with Session() as session:
        for model, message in (
            ({"a": object()}, r"replica 'm': leaf \$\.a is an object; allowed are"),
            ({"a.b": 1, "a": {"b": 2}}, r"replica 'm': two leaves have the name 'a\.b'$"),
            (
                {"net": net(), "step": 3},
                r"replica 'm': \$\.net is changed in place, and \$\.step can only be replaced: ",
            ),
        ):
            with pytest.raises(SchemaError, match=f"^{message}"):
                session.replica("m", model)
        with pytest.raises(SchemaError, match=r"^the name of a replica is a str, not 3$"):
            session.replica(3, net())  # type: ignore[call-overload]
        assert session.resources()["variables"] == {}


def test_overwriting_is_asked_for() -> None:
    with Session() as session:
        session.replica("model", flat(1))
        assert session.replica("model", flat(2)).variable.read().tree["0.bias"][0] == 1
        assert (
            session.replica("model", flat(3), overwrite=True).variable.read().tree["0.bias"][0] == 3
        )


def test_what_does_not_fit_is_not_pushed_and_a_pull_is_all_or_nothing() -> None:
    with Session() as session:
        module = net()
        replica = session.replica("model", module)
        version = replica.variable.version
        for tree, op, message in (
            ({"0.bia": 1}, "add", r"push 'model': '0\.bia' is no leaf of it; there are \['0\.b"),
            (
                {"0.bias": 1.0},
                "add",
                r"assign_add 'model': leaf .* is float, declared",
            ),
            ({"0.bias": torch.ones(3)}, "assign", r"assign 'model': leaf .* is missing, declared"),
            (None, "sub", r"push 'model': op is 'assign' or 'add', not 'sub'$"),
        ):
            with pytest.raises(SchemaError, match=f"^{message}"):
                replica.push(tree, op)  # type: ignore[arg-type]
        assert replica.variable.version == version
        # The last of its parameters becomes another while it is linked.
        module[2].bias = nn.Parameter(torch.zeros(2))  # type: ignore[index]
        before = contents(module)
        session.replica("model", flat(5)).push()
        with pytest.raises(
            SchemaError, match=r"^pull 'model': leaf \$\['2\.bias'\] is float32\[2\], declared"
        ):
            replica.pull()
        assert contents(module) == before


def test_a_variable_in_place_of_a_name_is_waited_for_and_stamps() -> None:
    with Session() as session:
        waiting = Call(lambda: session.variable("model"))
        session.replica("model", flat(1))
        variable = waiting.outcome()
        module = net()
        replica = session.replica(variable, module)
        assert replica.variable is variable
        assert (variable.first_read, variable.held) == (None, None)
        version = replica.pull()
        assert (variable.first_read, variable.held) == (version, version)
        variable.first_read = None
        replica.pull()
        assert variable.first_read == version


def rollouts(policy: Any, worker: paceline.Worker) -> Iterator[Any]:
    model = nested()
    replica = worker.session.replica(policy, model)
    while True:
        version = replica.pull()
        yield {"version": version, "weight": float(model["0"]["bias"][0])}


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_a_workers_items_carry_the_version_that_its_replica_pulled(engine: str) -> None:
    with paceline.Cluster(2, engine=engine, progress="quiet") as cluster:
        module = net()
        mine = cluster.session.replica("policy", module)
        batches = cluster.collect(rollouts, mine.variable, batch_size=2, max_lag=1)
        for number, batch in enumerate(batches):
            assert batch.version.tolist() == batch.data["version"].tolist()
            if number == 5:
                break
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(number)
            mine.push()


def test_a_replica_does_not_travel_and_its_variable_does() -> None:
    with Session() as session:
        replica = session.replica("model", flat())
        captured = dump(lambda: replica)
        with pytest.raises(FunctionError, match=r"^a replica cannot be used in another process "):
            load(captured, session.handle)
        variable = replica.variable
        run: Any = load(dump(lambda: variable), session.handle)
        assert run().version == variable.version
        assert repr(replica) == "<Replica 'model' of a dict>"


# Several servers


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> paceline.ClusterSpec:
    monkeypatch.setenv("HOME", str(tmp_path))
    return cluster(tmp_path, ps=2, worker=2)


def test_the_leaves_are_where_the_setter_says_with_one_version(spec: paceline.ClusterSpec) -> None:
    with served(spec):
        one, two = (Session(spec, job="worker", index=n) for n in (0, 1))
        with one, two:
            for session in (one, two):
                # Four leaves in turn, and the next is at the first again; in each process.
                with session.device(replica_device_setter(session)):
                    session.replica("model", net())
                    session.variable("after", 1)
                    session.replica("shards", net(), sharded=True)
                    session.variable("last", 1)
            assert one.resources()["spread"] == {"model": ["ps:0", "ps:1"]}
            homes = one.resources()["homes"]
            for name, task in {
                "model": "ps:0",
                "after": "ps:0",
                "shards": "ps:0",
                "shards@ps:1": "ps:1",
                "last": "ps:1",
            }.items():
                assert homes[f"variable {name}"] == task
            with one.device(replica_device_setter(one)), two.device(replica_device_setter(two)):
                assert one.replica("model", net()).pull() == two.replica("model", net()).pull()


def test_without_a_setter_a_replica_is_spread_evenly_or_where_it_is_told(
    spec: paceline.ClusterSpec,
) -> None:
    def told(leaves: list[tuple[str, int]]) -> list[Any]:
        assert leaves == [("0.bias", 12), ("0.weight", 24), ("2.bias", 4), ("2.weight", 12)]
        return ["ps:1", ["ps:0", "ps:1"], "ps:1", "ps:1"]

    with served(spec), Session(spec, job="worker", index=0) as session:
        with Session(spec, job="worker", index=1) as other:
            for name, placement in (("even", None), ("told", told)):
                mine = session.replica(name, net(), placement=placement)
                version = other.replica(name, nested(4)).push()
                assert mine.pull() == version
                assert filled(mine.value, 4)
            assert session.resources()["spread"] == {
                "even": ["ps:0", "ps:1"],
                "told": ["ps:0", "ps:1"],
            }
        with session.device("ps:1"):
            session.replica("there", net())
        assert session.resources()["homes"]["variable there"] == "ps:1"
        assert "there" not in session.resources()["spread"]


def at(task: str) -> Callable[[list[tuple[str, int]]], list[str]]:
    return lambda leaves: [task] * len(leaves)


def test_shards_have_versions_of_their_own(spec: paceline.ClusterSpec) -> None:
    with served(spec):
        one, two = (Session(spec, job="worker", index=n) for n in (0, 1))
        with one, two:
            with one.device(replica_device_setter(one)):
                mine = one.replica("model", net(), sharded=True)
            # Who made the first said where each leaf is.
            theirs = two.replica("model", nested(3), sharded=True, placement=at("ps:1"))
            assert [*mine.variables] == ["ps:0", "ps:1"]
            assert [*mine.variables["ps:0"].read().tree] == ["0.bias", "2.bias"]
            assert one.resources()["homes"]["variable model@ps:1"] == "ps:1"
            assert mine.versions == {}
            first = mine.pull()
            assert mine.versions == first == {t: v.version for t, v in mine.variables.items()}
            # An optimiser beside one shard.
            share = theirs.variables["ps:1"]
            share.assign({name: np.full_like(a, 9) for name, a in share.read().tree.items()})
            bias = mine.value.get_parameter("0.bias").tolist()
            second = mine.pull()
            assert second["ps:0"] == first["ps:0"]
            assert second["ps:1"] > first["ps:1"]
            assert (mine.value.get_parameter("2.weight") == 9).all()
            assert mine.value.get_parameter("0.bias").tolist() == bias
            assert theirs.push() == theirs.versions
            mine.pull()
            assert filled(mine.value, 3)
            mine.push({"0.bias": torch.ones(3)}, op="add")
            theirs.pull()
            assert theirs.value["0"]["bias"].tolist() == [4, 4, 4]
            assert repr(mine) == "<ShardedReplica 'model' of a Sequential>"
            with pytest.raises(SchemaError, match=r"^replica 'model': leaf .*\], declared str$"):
                two.replica("model", net())
            two.replica("whole", net())
            with pytest.raises(SchemaError, match=r"^replica 'whole': it is there, and not s"):
                two.replica("whole", net(), sharded=True)


def test_a_placement_for_shards_must_name_a_server_for_each_leaf(
    spec: paceline.ClusterSpec,
) -> None:
    with served(spec), Session(spec, job="worker", index=0) as session:
        for placement, message in (
            (lambda leaves: ["ps:0"], r"it has 4 arrays, and 1 were placed$"),
            (at("ps:7"), r"leaf 0\.bias: ps:7 runs no server; there are \['ps:0', 'ps:1'\]$"),
            (lambda leaves: None, r"placement= returns a list with a task for each, not None$"),
            (lambda leaves: [None] * 4, r"leaf 0\.bias was placed at None: a task is a text such"),
            (
                lambda leaves: [["ps:1", "ps:0"]] * 4,
                r"'0\.bias' is on one task if sharded, not on \['ps:1', 'ps:0'\]$",
            ),
        ):
            wrong: Any = placement
            with pytest.raises(paceline.PacelineError, match=rf"^replica 'model': {message}"):
                session.replica("model", net(), sharded=True, placement=wrong)
        assert session.resources()["variables"] == {}
        made = session.replica("model", net(), sharded=True, placement=at("/job:ps/task:1"))
        assert [*made.variables] == ["ps:1"]
        session.replica("whole", net(), placement=at("/job:ps/task:1"))
        assert session.resources()["spread"] == {"whole": ["ps:0", "ps:1"]}


def test_a_placement_is_checked_where_there_is_no_choice() -> None:
    with Session() as session:
        for placement, message in (
            (5, r"placement= is a function of the paths and bytes of all arrays, not 5$"),
            (lambda leaves: [1] * 4, r"leaf 0\.bias was placed at 1: a task is a text such"),
        ):
            wrong: Any = placement
            with pytest.raises(SchemaError, match=rf"^replica 'model': {message}"):
                session.replica("model", net(), placement=wrong)
            with pytest.raises(SchemaError, match=rf"^replica 'model': {message}"):
                session.replica("model", net(), sharded=True, placement=wrong)
        assert session.resources()["variables"] == {}


def test_without_several_servers_a_sharded_replica_has_one_shard() -> None:
    with Session() as session:
        mine = session.replica("model", net(), sharded=True)
        assert [*mine.pull()] == ["ps:0"]
        with pytest.raises(TimedOut):
            session.variable("model@ps:1", timeout=0)


TORCH = """
import torch
import paceline

net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
with paceline.Session.from_environment() as session:
    replica = session.replica("model", net)
    for parameter in net.parameters():
        parameter.data.fill_(1)
    replica.push()
    session.barrier("pushed", 2).wait()
    session.barrier("added", 2).wait()
    replica.pull()
    print({name: p.flatten()[0].item() for name, p in net.named_parameters()})
"""

NUMPY = """
import numpy as np
import paceline

net = {
    "2": {"bias": np.zeros(1, np.float32), "weight": np.zeros((1, 3), np.float32)},
    "0": {"bias": np.zeros(3, np.float32), "weight": np.zeros((3, 2), np.float32)},
}
with paceline.Session.from_environment() as session:
    replica = session.replica("model", net)
    session.barrier("pushed", 2).wait()
    replica.pull()
    print(sorted({float(a.mean()) for layer in net.values() for a in layer.values()}))
    replica.push(net, op="add")
    session.barrier("added", 2).wait()
"""


@pytest.mark.timeout(120)
def test_two_processes_with_different_frameworks_share_parameters_over_two_servers(
    tmp_path: Path,
) -> None:
    made = cluster(tmp_path, ps=2, worker=2)
    toml(made, tmp_path / "cluster.toml")
    programs = []
    where = ("--cluster", "cluster.toml")
    try:
        for n, text in enumerate((TORCH, NUMPY)):
            (tmp_path / f"{n}.py").write_text(text)
            words = ["run", f"{n}.py", *where, "--job", "worker", "--task", str(n)]
            programs.append(start("-m", "paceline", *words, folder=tmp_path))
        for n in range(2):
            words = ["serve", *where, "--job", "ps", "--task", str(n)]
            programs.append(start("-m", "paceline", *words, folder=tmp_path))
        out = [ended(program)[0] for program in programs]
    finally:
        for program in programs:
            program.send_signal(signal.SIGKILL)
            program.communicate()
    assert "{'0.weight': 2.0, '0.bias': 2.0, '2.weight': 2.0, '2.bias': 2.0}\n" in out[0]
    assert "[1.0]\n" in out[1]


def test_an_addition_says_what_to_add() -> None:
    with paceline.Session() as session:
        replica = session.replica("model", {"w": np.ones(2)})
        with pytest.raises(paceline.SchemaError, match=r"^push 'model': op='add' adds a tree"):
            replica.push(op="add")
        assert replica.push({"w": np.ones(2)}, op="add") == replica.variable.version
        assert replica.variable.read().tree["w"].tolist() == [2, 2]


def test_leaves_that_are_pushed_back_change_nothing_whatever_the_names() -> None:
    with Session() as session:
        for name, names in (
            ("swap", {"a": "b", "b": "a"}),
            ("shift", {"a": None, "b": "a", "c": "b"}),
        ):
            model = {leaf: np.full(1, n) for n, leaf in enumerate("abc"[: len(names)])}
            replica = session.replica(name, model, names=names)
            before = replica.variable.read().tree
            replica.push(replica.leaves())
            replica.push(replica.value)
            assert replica.variable.read().tree == before
            replica.push(replica.leaves(), op="add")
            assert replica.variable.read().tree == {leaf: 2 * a for leaf, a in before.items()}
        # All of the model's own names: not all are shared.
        replica.push({**model}, op="add")
        assert replica.variable.read().tree == {leaf: 3 * a for leaf, a in before.items()}
        message = (
            r"^push 'shift': 'd' is no leaf of it; there are \['a', 'b'\], its own are \['a', 'b'"
        )
        with pytest.raises(SchemaError, match=message):
            replica.push({"d": np.ones(1)})


def test_nothing_to_add_is_an_error_and_some_none_are_left_out() -> None:
    with Session() as session:
        replica = session.replica("m", {"a": np.zeros(1), "b": np.zeros(1)})
        for tree in ({"a": None, "b": None}, {}):
            with pytest.raises(SchemaError, match=r"^push 'm': nothing to add: no leaf of"):
                replica.push(tree, op="add")
        replica.push({"a": None, "b": np.ones(1)}, op="add")
        assert replica.variable.read().tree == {"a": [0], "b": [1]}


def test_a_replica_counts_as_messages_do() -> None:
    with Session() as session:
        replica = session.replica("m", {"a": np.zeros(1)})
        replica.push({"a": np.ones(1)}, op="add")
        counts = [replica.count]
        replica.pull()
        counts.append(replica.count)
        assert counts == [None, replica.variable.read().count] == [None, 2]
        sharded = session.replica("s", {"a": np.zeros(1)}, sharded=True)
        sharded.pull()
        assert sharded.counts == {"ps:0": 1}


def test_wrong_arguments_of_a_replica_are_said() -> None:
    with Session() as session:
        made: Any = session.replica
        for options, message in (
            ({"model": {"a": 1}, "names": 5}, r"names is a dict or a function, not 5$"),
            ({"model": {"a": 1}, "sharded": "yes"}, r"sharded is True or False, not 'yes'$"),
            ({}, r"give a model; session\.variable\('m'\) needs none$"),
        ):
            with pytest.raises(SchemaError, match=rf"^replica 'm': ({message})"):
                made("m", **options)
        assert session.resources()["variables"] == {}
