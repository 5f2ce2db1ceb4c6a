"""`phalanx bench`: times operations between ranks, beside other libraries in the same processes."""
