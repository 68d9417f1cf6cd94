"""The program behind `paceline demo`: CartPole-v1, an actor-critic in NumPy, PPO."""
