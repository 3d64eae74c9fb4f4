"""What ``ringcoll bench`` is made of: cases, checks, clocks, peers and reports.

It speaks the flags, columns and bandwidth factors of nccl-tests, checks every element in the run
that it times, and lets a peer work on the same buffers in turns with ringcoll.
"""
