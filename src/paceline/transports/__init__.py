"""Transports: each moves frames in its own way; nothing above can tell which."""
