"""What serves jobs from outside: seeing them, clusters, other people's files, benches, loggers."""
