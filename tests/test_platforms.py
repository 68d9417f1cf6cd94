"""What must work where there are no Unix sockets, descriptors to pass, or polls."""

import subprocess
import sys

PROGRAM = """
import select, socket, sys
for name in ("fcntl", "resource"):
    sys.modules[name] = None
for name in ("poll", "epoll", "POLLIN", "POLLOUT", "POLLHUP", "POLLERR", "POLLRDHUP"):
    if hasattr(select, name):
        delattr(select, name)
del socket.AF_UNIX, socket.CMSG_SPACE, socket.SCM_RIGHTS

import numpy as np
import paceline

def items(policy):
    while True:
        yield policy.read().tree

with paceline.Cluster(workers=2, engine="serial", progress="quiet") as cluster:
    policy = cluster.variable("policy", np.zeros(3))
    print(cluster.collect(items, policy, batch_size=4).next().data.shape)
"""


def test_import_and_serial_need_nothing_that_windows_lacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50
    )
    assert (done.stdout, done.stderr) == ("(4, 3)\n", "")
