"""How messages cross a process boundary."""
