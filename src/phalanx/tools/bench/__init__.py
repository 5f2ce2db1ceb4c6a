"""How fast ranks move tensors, beside other libraries in the same processes: `phalanx bench`.

request                what to measure, from the words of a command line
operations, training   what is run, and the expected result
peer, peers            who runs it
rank, peak             one rank's part: the clock, and peaks of memory
start                  the ranks, as processes started here or by a launcher
results                what they say
tables, files          how it is shown and kept: JSON, a picture, what `auto` picks algorithms by
"""
