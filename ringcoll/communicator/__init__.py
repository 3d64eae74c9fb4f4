"""The communicator: what users hold, and how a call goes from there to an executor.

``setup`` makes communicators, ``public`` is the object. ``engine`` says what an engine is: that of
CPU ranks lies in ``cpu``, that of GPU ranks in ``cuda``. ``rank`` holds one rank's memory,
executors and errors. ``group`` runs calls together, ``vector`` makes plans or pairs of the
v-variants, ``work`` runs asynchronous collectives, ``failures`` are errors of calls.
"""
