"""Runs the questions one after the other; what each shows is printed, and its check is made.

python examples/between_graph            # all
python examples/between_graph q1 q3      # some
"""

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path(__file__).parent
NEEDED = {"q4": "torch", "q4_elegant": "torch", "q4_tensorflow": "tensorflow"}


def main(names):
    """Run those, or all; the exit status says whether all held."""
    programs = {path.stem: path for path in sorted(FOLDER.glob("q*.py"))}
    for name in names:
        if name not in programs:
            sys.exit(f"no question {name!r}; there are {list(programs)}")
    failed = []
    for name in names or programs:
        title = ast.get_docstring(ast.parse(programs[name].read_text())).partition("\n")[0]
        print(f"{name}: {title}", flush=True)
        package = NEEDED.get(name, "numpy")
        if find_spec(package) is None:
            print(f"  left out: {package} is not installed\n", flush=True)
            continue
        done = subprocess.run([sys.executable, *sys.orig_argv[1 : -len(sys.argv)], programs[name]])
        print(flush=True)
        failed += [name] * (done.returncode != 0)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main(sys.argv[1:])
