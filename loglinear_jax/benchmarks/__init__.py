"""Time and memory on the machine at hand, beside peers."""
