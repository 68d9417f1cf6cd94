"""The layers, the budgets and the public names, read from the source with `ast`."""

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline

ROOT = Path(paceline.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

# A module imports only from a lower floor. Rooms on one floor never import each other; the files
# of one room may.
FLOORS: dict[str, int] = {
    room: floor
    for floor, rooms in {
        -1: "_version",
        0: "core",
        1: "transports engines adapters disk preflight metrics functions calling blas spec"
        " secret pending",
        2: "server connection packing placement checkpoints post_mortems",
        3: "requests linked batches lines handles stores rows shares cuts mirrors",
        4: "reach lookout noting variables spread queues accumulators counters readers barriers"
        " operations leaves",
        5: "replicas resources plans restoring",
        6: "session ps mirroring",
        7: "worker",
        8: "keeping revival supervisor collection crew hosting hosted replay",
        9: "progress watch staff",
        10: "cluster",
        11: "paceline",  # the public names: only entry points may take them from there
        12: "testing demo",
        13: "cli",
        14: "__main__",
    }.items()
    for room in rooms.split()
}

# Third parties that are heavy or slow to import, each with the only places that may name it.
# There they may be imported inside a function, which nothing else may be.
OWN_PLACES: dict[str, tuple[str, ...]] = {
    "torch": ("adapters/pytorch.py",),
    "jax": ("adapters/jax.py",),
    "ml_dtypes": ("core/bfloat16.py",),
    "keras": ("adapters/keras.py",),
    "tensorflow": ("adapters/tensorflow.py",),
    "ray": ("engines/ray.py", "engines/_actor.py", "engines/_room.py"),
    "gymnasium": ("demo/",),
    "matplotlib": ("demo/",),
    "rich": ("progress.py", "cli/", "demo/"),
    "click": ("cli/",),
}

# What makes objects of bytes. It is for lines to processes that were started here, and never for
# what came over a network: what reads from there may not even have it imported.
REVIVING = {"pickle", "cloudpickle", "marshal", "shelve", "dill", "joblib"}
MAY_REVIVE = ("functions.py", "engines/")
FROM_THE_NETWORK = ("core", "transports", "server", "connection", "packing", "lines", "session")

CORE_MAY_IMPORT = {"numpy", "msgspec", "paceline"}
CORE_MAY_TRY = {("core/bfloat16.py", "ml_dtypes")}
OUTSIDE_CORE = """
    asyncio concurrent ctypes fcntl mmap multiprocessing os pathlib queue secrets
    select selectors shutil signal socket socketserver ssl subprocess tempfile
    threading
""".split()

FILE_LINES = 400
FUNCTION_LINES = 50

PUBLIC_NAMES = [
    "Accumulator",
    "Barrier",
    "Batch",
    "CheckpointError",
    "Closed",
    "Cluster",
    "ClusterSpec",
    "Collection",
    "Counter",
    "Disconnected",
    "FunctionError",
    "Mean",
    "OperationFailed",
    "OutOfMemory",
    "PacelineError",
    "Piece",
    "ProtocolError",
    "Queue",
    "Ray",
    "Reader",
    "Refused",
    "Replica",
    "Request",
    "Rows",
    "SchemaError",
    "Server",
    "Session",
    "ShardedReplica",
    "Snapshot",
    "Stats",
    "Supervisor",
    "TaskFailed",
    "TimedOut",
    "Tls",
    "TooStale",
    "UnknownName",
    "Unsupported",
    "Variable",
    "WasReset",
    "Worker",
    "WorkerFailed",
    "WorkerLeft",
    "WouldBlock",
    "__version__",
    "replica_device_setter",
    "reset",
]


@dataclass(frozen=True)
class Import:
    """One imported module, by its full dotted name, and where that is written."""

    name: str
    line: int
    in_function: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def module_name(file: Path) -> str:
    parts = ["paceline", *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in FILES}


def room(module: str) -> str:
    """`paceline.core.tree` is in the room `core`; `paceline` itself is a room of its own."""
    return [*module.split("."), ""][1] or "paceline"


def floor(module: str) -> int:
    assert room(module) in FLOORS, f"give {room(module)} a floor in {Path(__file__).name}"
    return FLOORS[room(module)]


def short(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def imports(source: str) -> list[Import]:
    """Every import of a file, those inside functions and `TYPE_CHECKING` included."""
    tree = ast.parse(source)
    inside = {id(node) for function in functions(tree) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: write the import in full"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES else str(node.module) for name in whole]
        else:
            continue
        found += [Import(name, node.lineno, id(node) in inside) for name in names]
    return found


def dynamic_imports(source: str) -> list[int]:
    """The lines that import a module whose name is a value."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr == "import_module")
        or (isinstance(node, ast.Name) and node.id in {"import_module", "__import__"})
    ]


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the lines of a function from its `def` on, less its docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


each_file = pytest.mark.parametrize("file", FILES, ids=short)


@each_file
def test_a_module_imports_only_from_lower_floors(file: Path) -> None:
    importer = module_name(file)
    height = floor(importer)
    wrong = [
        f"{short(file)}:{found.line} (floor {height}) imports {found.name} "
        f"(floor {floor(found.name)})"
        for found in imports(file.read_text())
        if found.top == "paceline"
        and room(found.name) != room(importer)
        and floor(found.name) >= height
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {
        module: {found.name for found in imports(file.read_text()) if found.name in MODULES}
        - {module}
        for module, file in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()


@each_file
def test_heavy_third_parties_are_named_only_in_their_own_files(file: Path) -> None:
    wrong = [
        f"{short(file)}:{found.line} imports {found.name}; it belongs to {OWN_PLACES[found.top]}"
        for found in imports(file.read_text())
        if found.top in OWN_PLACES and not short(file).startswith(OWN_PLACES[found.top])
    ]
    assert not wrong


def reviving(source: str) -> list[str]:
    """How a file could make objects of bytes."""
    calls = [
        f"line {node.lineno}: {ast.unparse(node.func)}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and (
            (isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"})
            or any(word.arg == "allow_pickle" for word in node.keywords)
        )
    ]
    return calls + [
        f"line {found.line}: imports {found.name}"
        for found in imports(source)
        if found.top in REVIVING
    ]


@each_file
def test_pickles_are_named_only_where_functions_travel(file: Path) -> None:
    if not short(file).startswith(MAY_REVIVE):
        assert reviving(file.read_text()) == []


def test_nothing_that_reads_from_a_network_can_unpickle() -> None:
    after = {
        module: {found.name for found in imports(file.read_text()) if found.name in MODULES}
        for module, file in MODULES.items()
    }
    seen = {module for module in MODULES if room(module) in FROM_THE_NETWORK}
    new = seen
    while new := {name for module in new for name in after[module]} - seen:
        seen |= new
    wrong = [name for name in seen if short(MODULES[name]).startswith(MAY_REVIVE)]
    assert wrong == []


def test_what_revives_objects_is_seen() -> None:
    source = "import cloudpickle\nfrom pickle import loads\neval('1')\nload(f, allow_pickle=True)\n"
    assert len(reviving(source)) == 4


@each_file
def test_modules_are_imported_on_use_only_by_the_base_of_a_family(file: Path) -> None:
    if file.name == "base.py":
        return
    source = file.read_text()
    hidden = [
        found.line for found in imports(source) if found.in_function and found.top not in OWN_PLACES
    ]
    wrong = [f"{short(file)}:{line}" for line in hidden + dynamic_imports(source)]
    assert not wrong


@each_file
def test_core_is_pure(file: Path) -> None:
    if not short(file).startswith("core/"):
        return
    allowed = (CORE_MAY_IMPORT | sys.stdlib_module_names) - set(OUTSIDE_CORE)
    wrong = [
        f"{short(file)}:{found.line} imports {found.name}"
        for found in imports(file.read_text())
        if found.top not in allowed and (short(file), found.name) not in CORE_MAY_TRY
    ]
    assert not wrong


@each_file
def test_files_and_functions_stay_within_their_budgets(file: Path) -> None:
    source = file.read_text()
    over = [
        f"{short(file)}:{function.lineno} {function.name} has {body_lines(function)} lines, "
        f"the budget is {FUNCTION_LINES}"
        for function in functions(ast.parse(source))
        if body_lines(function) > FUNCTION_LINES
    ]
    lines = len(source.splitlines())
    if lines > FILE_LINES:
        over.append(f"{short(file)} has {lines} lines, the budget is {FILE_LINES}")
    assert not over


def test_the_public_names_are_these_and_no_others() -> None:
    assert list(paceline.__all__) == PUBLIC_NAMES
    assert [name for name in PUBLIC_NAMES if not hasattr(paceline, name)] == []


def test_importing_paceline_imports_nothing_heavy() -> None:
    program = "import json, sys, paceline; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert sorted(loaded & OWN_PLACES.keys()) == []


def test_an_import_inside_a_function_does_not_escape_these_rules() -> None:
    source = "import os\ndef f():\n    from paceline import _version\n    import torch.nn\n"
    expected = [
        Import("os", 1, in_function=False),
        Import("paceline._version", 3, in_function=True),
        Import("torch.nn", 4, in_function=True),
    ]
    assert imports(source) == expected
    assert dynamic_imports("import importlib\nimportlib.import_module('torch')\n") == [2]


def test_the_docstring_is_no_part_of_the_budget_of_a_function() -> None:
    (function,) = functions(ast.parse('def f():\n    """One.\n\n    Two.\n    """\n    return 1\n'))
    assert body_lines(function) == 2
