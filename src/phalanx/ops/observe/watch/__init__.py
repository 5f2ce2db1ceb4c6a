"""`phalanx watch`: a job while it runs, in the terminal or on a page.

state       a rank, and a job, at one moment
folder      the states of a host's ranks, and of their launcher, as files
publish     a rank's state there, while somebody watches
launcher    the launcher's state there
nodes       the folder over the network, for holders of the token; all nodes of a job as one
gather      states of the job, one after the other: the slowest rank, the chain of waits
terminal    a state as a table
web         a state on a page, page.html
"""
