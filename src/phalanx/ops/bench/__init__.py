"""`phalanx bench`: times operations between ranks, beside other libraries in the same processes.

request      a request, made from the words of a command line, and the ranks' answers
start        the ranks, as processes started here or by a launcher
rank         one rank's part: the clock
operations   the operations, and their expected results
peers        the interface of a library here, the libraries, and the table of them
report       the figures, as tables, as JSON, and as the file by which `auto` picks
its algorithms
"""
