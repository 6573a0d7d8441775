"""Time and memory on this machine, compared with other implementations."""
