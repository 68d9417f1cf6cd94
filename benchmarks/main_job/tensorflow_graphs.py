"""TensorFlow 1's own way, as the question that paceline answers describes it: between-graph.

This process is the main program, and hosts the calculation server: it has all parameters and the
training op. Workers are tasks of the same cluster, each with a graph whose variables are linked to
these by an assignment at the start of a rollout, and put rollouts into its queue. They begin when
a further queue of theirs says so.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
import gymnasium
import numpy as np
import tensorflow.compat.v1 as tf
from acting import SIZES, generalised
from report import Report
from settings import Job

NAMES = ("obs", "action", "logp", "advantage", "target")
KINDS = [tf.float32, tf.int64, tf.float32, tf.float32, tf.float32, tf.string]
HOME = "/job:calculation/task:0/cpu:0"


def network(scope: str, obs: Any, actions: int) -> tuple[Any, Any]:
    """Logits and values; each with layers of its own."""
    results = []
    for name, size, gain in (("policy", actions, 0.01), ("value", 1, 1.0)):
        x = obs
        for n, (width, scale) in enumerate([(64, 2**0.5), (64, 2**0.5), (size, gain)]):
            with tf.variable_scope(f"{scope}/{name}/{n}"):
                start = tf.initializers.orthogonal(scale)
                kernel = tf.get_variable("kernel", [x.shape[1], width], initializer=start)
                bias = tf.get_variable("bias", [width], initializer=tf.zeros_initializer())
            x = x @ kernel + bias
            x = x if width == size else tf.tanh(x)
        results.append(x)
    return results[0], results[1][:, 0]


def shared(environment: str, workers: int) -> tuple[list[Any], Any, list[Any]]:
    """What is on the calculation server: parameters, the queue of data, and one to each worker."""
    inputs, actions = SIZES[environment]
    with tf.device(HOME):
        network("global", tf.placeholder(tf.float32, [None, inputs]), actions)
        data = tf.FIFOQueue(2 * workers, KINDS, shared_name="data")
        tell = [tf.FIFOQueue(1, [tf.bool], shared_name=f"tell {n}") for n in range(workers)]
    return tf.global_variables("global"), data, tell


def worker(cluster: Any, index: int, environment: str, job: Job, seed: int) -> None:
    """Collect, each time that it is told to."""
    one_thread = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    server = tf.train.Server(cluster, "worker", index, config=one_thread)
    inputs, actions = SIZES[environment]
    envs = job.envs // job.workers
    tf.set_random_seed(seed)
    parameters, data, tell = shared(environment, job.workers)
    with tf.device(f"/job:worker/task:{index}/cpu:0"):
        seen = tf.placeholder(tf.float32, [None, inputs])
        logits, value = network("local", seen, actions)
        action = tf.random.categorical(logits, 1)[:, 0]
        logp = -tf.nn.sparse_softmax_cross_entropy_with_logits(labels=action, logits=logits)
        pairs = zip(tf.global_variables("local"), parameters, strict=True)
        link = tf.group(*(mine.assign(theirs) for mine, theirs in pairs))
        items = [tf.placeholder(kind) for kind in KINDS]
    put, told = data.enqueue(items), tell[index].dequeue()
    rollouts = playing(environment, envs, job, seed)
    with tf.Session(server.target) as session:
        try:
            next(rollouts)
            while True:
                session.run(told)
                session.run(link)
                rollout = rollouts.send(lambda obs: session.run([action, logp, value], {seen: obs}))
                session.run(put, dict(zip(items, rollout, strict=True)))
                next(rollouts)
        except (tf.errors.OpError, KeyboardInterrupt):
            return  # the main program has ended


def playing(environment: str, envs: int, job: Job, seed: int) -> Any:
    """A rollout for each policy that is sent; the returns of its episodes are the last leaf."""
    mine = [gymnasium.make(environment, disable_env_checker=True) for _ in range(envs)]
    obs = np.stack([env.reset(seed=seed + n)[0] for n, env in enumerate(mine)])
    so_far = np.zeros(envs)
    while True:
        policy = yield
        steps, returns = [], []
        for _ in range(job.steps):
            action, logp, value = policy(obs)
            after, reward, ended = (
                np.empty_like(obs),
                np.zeros(envs, np.float32),
                np.zeros(envs, bool),
            )
            for n, env in enumerate(mine):
                last, gain, terminal, cut, _ = env.step(int(action[n]))
                reward[n], ended[n] = gain, terminal or cut
                so_far[n] += gain
                if ended[n]:
                    if not terminal:
                        reward[n] += job.discount * policy(last[None])[2][0]
                    returns.append(so_far[n])
                    so_far[n], last = 0.0, env.reset()[0]
                after[n] = last
            steps.append((obs, action, logp, value, reward, ended))
            obs = after
        seen, action, logp, value, reward, ended = map(np.stack, zip(*steps, strict=True))
        values = np.concatenate([value, policy(obs)[2][None]])
        advantage = generalised(reward, values, ended, job.discount, job.trace)
        made = [seen, action, logp, advantage, advantage + value]
        yield [*(x.reshape(-1, *x.shape[2:]) for x in made), np.array(returns).tobytes()]


def training(environment: str, job: Job) -> tuple[Any, list[Any]]:
    """The training op, and what it is fed."""
    inputs, actions = SIZES[environment]
    fed = [tf.placeholder(KINDS[n], [None, inputs] if n == 0 else [None]) for n in range(5)]
    obs, action, logp, advantage, target = fed
    with tf.variable_scope("", reuse=True):
        logits, value = network("global", obs, actions)
    mean, variance = tf.nn.moments(advantage, [0])
    advantage = (advantage - mean) / (tf.sqrt(variance) + 1e-8)
    now = -tf.nn.sparse_softmax_cross_entropy_with_logits(labels=action, logits=logits)
    ratio = tf.exp(now - logp)
    clipped = tf.clip_by_value(ratio, 1 - job.clip, 1 + job.clip)
    loss = -tf.reduce_mean(tf.minimum(ratio * advantage, clipped * advantage))
    loss += job.value * tf.reduce_mean(tf.square(value - target))
    if job.entropy:
        every = tf.nn.log_softmax(logits)
        loss += job.entropy * tf.reduce_mean(tf.reduce_sum(tf.exp(every) * every, -1))
    adam = tf.train.AdamOptimizer(job.rate, epsilon=1e-5)
    slopes, variables = zip(*adam.compute_gradients(loss), strict=True)
    slopes, _ = tf.clip_by_global_norm(slopes, job.norm)
    return adam.apply_gradients(zip(slopes, variables, strict=True)), fed


def main() -> None:
    """Train until there is enough to report."""
    report = Report("tensorflow")
    job, environment = report.job, report.environment
    ports = [free() for _ in range(1 + job.workers)]
    hosts = [f"127.0.0.1:{port}" for port in ports]
    cluster = tf.train.ClusterSpec({"calculation": hosts[:1], "worker": hosts[1:]})
    spawn = multiprocessing.get_context("spawn")
    workers: list[Any] = []
    for index in range(job.workers):
        given = (cluster, index, environment, job, report.seed + 100 * (index + 1))
        workers.append(spawn.Process(target=worker, args=given, daemon=True))
        workers[-1].start()
    one_thread = tf.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=1)
    server = tf.train.Server(cluster, "calculation", 0, config=one_thread)
    tf.set_random_seed(report.seed)
    random = np.random.default_rng(report.seed)
    _, data, tell = shared(environment, job.workers)
    with tf.device(HOME):
        step, fed = training(environment, job)
        take, begin = data.dequeue(), [queue.enqueue([True]) for queue in tell]
    with tf.Session(server.target) as session:
        session.run(tf.global_variables_initializer())
        done = False
        while not done:
            session.run(begin)
            *rollouts, returns = zip(*(session.run(take) for _ in tell), strict=True)
            samples = [np.concatenate(leaf) for leaf in rollouts]
            for _ in range(job.epochs if report.measure != "collect" else 0):
                order = random.permutation(job.samples)
                for n in range(0, job.samples, job.minibatch):
                    rows = order[n : n + job.minibatch]
                    session.run(step, {f: s[rows] for f, s in zip(fed, samples, strict=True)})
            done = report.add(job.samples, np.frombuffer(b"".join(returns)))
    for one in workers:
        one.kill()
    os._exit(0)  # a server of TensorFlow has no way to stop


def free() -> int:
    """A port that nobody has."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


tf.disable_v2_behavior()  # in workers too, which import this file

if __name__ == "__main__":
    main()
