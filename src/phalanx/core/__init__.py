"""The core: one group, one engine, and what a rank has under way in it."""
