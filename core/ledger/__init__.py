"""Who waits for what."""
