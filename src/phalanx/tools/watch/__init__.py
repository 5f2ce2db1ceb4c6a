"""`phalanx watch`: a job while it runs, in the terminal or on a page.

gather.py     states of the job, one after the other: who is slowest, who waits for whom
terminal.py   a state as a table
web.py        a state on a page, page.html
"""
