"""Who works for a cluster. `base` is the contract, every other file is one way to have workers."""
