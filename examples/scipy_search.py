"""A black-box search with scipy: the controller that balances a pole, found by simulating.

`scipy.optimize.differential_evolution` takes `cluster.map` as its `workers`: each generation is one
map. A simulation that crashes or hangs ends its own process alone, and is tried once more. The
search knows nothing of the pole; the Riccati equation, which does, says how good it can get.

    python examples/scipy_search.py --workers 2
"""

import argparse
import functools
import sys

import numpy as np
from scipy.linalg import solve_discrete_are
from scipy.optimize import differential_evolution

import paceline

# A pole that falls: its angle and speed after 0.02 s are A @ [angle, speed] + B * torque.
A, B = np.array([[1.0, 0.02], [0.2, 1.0]]), np.array([0.0, 0.02])
OFF_COST, TORQUE_COST, STEPS = np.array([1.0, 0.1]), 0.01, 400
BOUNDS = [(0, 50), (0, 50)]


def simulate(gains):
    """The cost of a controller, on its way back from three starts."""
    state, cost = np.array([[0.2, 0.0], [0.0, 1.0], [-0.1, 1.0]]), 0.0
    for _ in range(STEPS):
        torque = -state @ gains
        cost += (state**2 @ OFF_COST).sum() + TORQUE_COST * (torque @ torque)
        if cost > 1e6:
            break  # the pole falls, however long we look
        state = state @ A.T + np.outer(torque, B)
    return cost


def known_optimum():
    """The gains with the least cost, by the Riccati equation."""
    b, torque_cost = B[:, None], np.array([[TORQUE_COST]])
    ahead = solve_discrete_are(A, b, np.diag(OFF_COST), torque_cost)
    return np.linalg.solve(torque_cost + b.T @ ahead @ b, b.T @ ahead @ A).ravel()


def main(workers, engine, generations, goal, seed):
    with paceline.Cluster(workers=workers, engine=engine, seed=seed) as cluster:
        found = differential_evolution(
            simulate,
            BOUNDS,
            workers=functools.partial(cluster.map, task_timeout=30, retries=1),
            updating="deferred",
            maxiter=generations,
            popsize=8,
            tol=1e-6,
            polish=False,
            rng=seed,
        )
    best = known_optimum()
    above = found.fun / simulate(best) - 1
    print(f"gains found {found.x.round(3)}, known optimum {best.round(3)}")
    how = "solved" if above <= goal else "not solved"
    print(f"{how}: cost {100 * above:.4f} % above the optimum after {found.nfev} simulations")
    return 0 if above <= goal else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--generations", type=int, default=30)
    parser.add_argument("--goal", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(main(**vars(parser.parse_args())))
