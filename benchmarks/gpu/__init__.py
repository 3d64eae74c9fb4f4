"""Measurements on GPUs: the hand-written yardstick, other libraries, the links, and one session.

Nothing but ``bars`` imports ``ringcoll``, so that the yardstick cannot share a mistake with it.
"""
