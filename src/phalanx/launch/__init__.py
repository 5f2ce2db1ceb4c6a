"""Starting ranks, and finding out which one this process is."""
