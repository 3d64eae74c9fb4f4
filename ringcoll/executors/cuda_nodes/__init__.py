"""GPU ranks on several nodes: bytes go through pinned host memory, where plans of CPU ranks run.

:mod:`.pieces` cuts a call, :mod:`.lane` lets a stream and the host wait for each other,
:mod:`.executor` and :mod:`.pairs` enqueue calls and carry them out. Large calls run in two layers
instead, most of them only where nodes are alike: :mod:`.layers` cuts them into slices,
:mod:`.exchange` enqueues their messages and :mod:`.carry` carries these out.
"""
