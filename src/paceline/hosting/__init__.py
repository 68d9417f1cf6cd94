"""Where a cluster lives that is launched: here, in processes of this host, or anywhere."""
