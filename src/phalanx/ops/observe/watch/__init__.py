"""`phalanx watch`: a job while it runs, in the terminal or on a page.

state       a rank, and a job, at one moment
folder      where the ranks of a host, and their launcher, leave their states
publish     what a rank leaves there, while somebody watches
launcher    what the launcher of a host leaves there
server      the folder over the network, for who holds the token
nodes       the states of all nodes of a job
gather      states of the job, one after the other: who is slowest, who waits for whom
terminal    a state as a table
web         a state on a page, page.html
"""
