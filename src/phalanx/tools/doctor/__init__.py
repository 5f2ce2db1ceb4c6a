"""`phalanx doctor`: what this machine has, and whether Phalanx works on it.

A check is a function that returns a `Finding`; the checks of one subject are a table in a file of
their own, and `examine.py` lists the subjects. To add a check: write it, put it in its table.
"""
