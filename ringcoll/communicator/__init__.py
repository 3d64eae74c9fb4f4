"""The communicator: what users hold, and how a call goes from there to an executor.

``public`` is the object and ``start`` its beginnings; ``calling`` prepares and keeps calls,
``selection`` decides what they run, ``rank`` holds one rank's memory, executors and errors.
``group`` runs calls together, ``vector`` makes plans or pairs of the v-variants, ``work`` runs
asynchronous collectives, ``progress`` moves messages, ``failures`` are errors of calls.
"""
