"""The server: `service` answers and waits, a desk per kind of resource, `loop` drives them."""
