"""What is learned in the fourth question: to balance a pole on a cart, with NumPy alone."""

import math

import numpy as np

STEPS, GOAL = 256, 100.0
"""Steps in an item, and the mean return that counts as learned; random play has about 20."""


class Pole:
    """CartPole: a cart that is pushed to the left or the right, and a pole that stands on it."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.state = self.rng.uniform(-0.05, 0.05, 4)
        return self.state.astype(np.float32)

    def step(self, right):
        """Push; what is seen then, and whether the episode has ended."""
        _, speed, angle, turning = self.state
        sin, cos = math.sin(angle), math.cos(angle)
        push = ((10.0 if right else -10.0) + 0.05 * turning**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        change = np.array([speed, push - 0.05 * turn * cos / 1.1, turning, turn])
        self.state = self.state + 0.02 * change
        fallen = abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)
        return self.state.astype(np.float32), fallen


def play(pole, choose):
    """Take `STEPS` steps, the action of each chosen by `choose(obs)`; leaves are `[STEPS, ...]`.

    `return` is the mean return of the episodes that ended on the way.
    """
    obs, action, to_go, reward, returns = [], [], [], 0, []
    now = pole.reset()
    while len(obs) < STEPS:
        obs.append(now)
        action.append(int(choose(now)))
        now, fallen = pole.step(action[-1])
        reward += 1
        if fallen or len(obs) == STEPS:
            to_go += range(reward, 0, -1)
            returns.append(reward)
            now, reward = pole.reset(), 0
    gain = np.array(to_go, np.float32)
    return {
        "obs": np.array(obs),
        "action": np.array(action),
        "to_go": gain,
        # The last episode was cut off, unless it is the only one.
        "return": float(np.mean(returns[:-1] or returns)),
    }
