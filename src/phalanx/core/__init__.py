"""The core: one group, one engine, and a rank's works under way."""
