"""How fast ranks move tensors, beside other libraries in the same processes: `phalanx bench`.

request      what to measure, from the words of a command line, and what ranks answer
start        the ranks, as processes started here or by a launcher
rank         one rank's part: the clock
operations   what it runs, and the expected result
peer         who runs it: the interface of a library here
peers        the libraries, and the table of them
report       what was found, how it is shown and kept: tables, JSON, what `auto` picks
             algorithms by
"""
