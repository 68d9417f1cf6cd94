"""The pure part: no thread, lock, socket or file."""
