"""Programs about Phalanx: what works here, how fast it is, what a job did."""
