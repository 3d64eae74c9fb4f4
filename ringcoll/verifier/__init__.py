"""The proof of a plan, and the tests of that proof.

``prover`` folds a plan over ``cells`` (memory), ``clocks`` (order) and ``expressions`` (content).
``calls`` proves calls in a row, ``induction`` every number of slices, ``symmetry`` that ranks are
alike, ``launches`` an algorithm in every launch. ``mutants`` break proven plans, ``schedules`` and
``reachability`` judge by other means what the proof accepts, and ``examine`` does all of it for the
built-in algorithms.
"""
