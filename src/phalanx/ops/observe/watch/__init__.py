"""`phalanx watch`: a job while it runs, in the terminal or on a page (docs/design.md)."""
