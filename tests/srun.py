"""Stands in for Slurm's `srun`: starts a step's ranks in namespaces, two on each node of three."""

from __future__ import annotations

import os
import subprocess
import sys

if __name__ == "__main__":
    prefix, count = os.environ["NAMESPACES"], int(os.environ["SLURM_NTASKS_PER_NODE"])
    nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
    step = {
        **os.environ,
        "SLURM_STEP_NODELIST": f"node[0-{nodes - 1}]",
        "SLURM_STEP_TASKS_PER_NODE": f"{count}(x{nodes})",
    }
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"{prefix}h{rank // count}", *sys.argv[1:]],
            env={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % count)},
        )
        for rank in range(nodes * count)
    ]
    sys.exit(max(rank.wait() for rank in ranks))
