"""GPU ranks on several nodes: data go through pinned host memory, where plans of CPU ranks run.

:mod:`.pieces` cuts a call, :mod:`.lane` lets a stream and the host wait for each other,
:mod:`.executor` and :mod:`.point_to_point` enqueue calls and carry them out. Large calls run in two
layers instead, most of them only on nodes of equal size: :mod:`.layers` cuts them into slices,
:mod:`.slices` and :mod:`.phases` make these, :mod:`.exchange` enqueues their messages and
:mod:`.carry` carries them out.
"""
