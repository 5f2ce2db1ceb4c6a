"""Services to jobs from outside: watching, clusters, foreign checkpoints, benches, loggers."""
