"""What runs in a worker: `line` is what its launcher says, `life` does it, for a `handle`."""
