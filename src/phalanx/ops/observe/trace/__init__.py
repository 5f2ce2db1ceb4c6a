"""`phalanx trace`: one trace of all ranks, and a page and a picture that sum it up."""
