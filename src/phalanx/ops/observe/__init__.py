"""How a job is doing, and a machine: watch, metrics, traces, the doctor."""
