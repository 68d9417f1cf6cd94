"""The workers of a cluster: `crew` looks after them, `collecting` and `calling` give them work."""
