"""The state of a job, and of a machine: watch, metrics, traces, the doctor."""
