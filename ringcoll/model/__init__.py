"""How long a plan takes, on paper.

``model`` holds the closed forms, ``links`` the figures of wires, ``machine`` those of a topology.
``predict`` is the one clock: a ``fold`` over a ``graph`` of steps. ``tuner`` takes the fastest
plan, ``explain`` and ``plot`` show what moves when.
"""
