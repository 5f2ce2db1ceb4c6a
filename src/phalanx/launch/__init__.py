"""Starting ranks, and finding each one's place in its job."""
