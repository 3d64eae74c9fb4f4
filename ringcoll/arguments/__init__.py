"""What users pass, checked before anything moves.

``buffers`` views any array as flat memory, ``calls`` and ``vector`` make a checked call of one,
with one count or one for each rank; ``checks`` and ``counts`` hold the rules that they share.
"""
