"""How fast ranks move tensors, beside other libraries in the same processes: `phalanx bench`.

ask         what to measure                    sizes, records
ranks       processes, with or without mpirun  start -> worker -> rank
peers       who is measured                    peers/
operations  what is done, and what has to come of it   operations, values
rounds      the clock                          rounds
peaks       of memory, each in fresh processes resident, peak
shown as    a table, JSON, a plot              table, peak_table, plot
used for    `auto`'s choice of an algorithm    tune
"""
