"""Jobs on clusters: scripts of Slurm, manifests of Kubernetes, groups under Ray."""
