"""Other libraries' groups of ranks: torch's process groups, MPI."""
