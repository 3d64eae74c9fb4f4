"""The class and the methods of ``cupyx.distributed``, over ringcoll.

A program changes one import, ``from ringcoll.cupyx import init_process_group``, and also runs on
numpy arrays and SciPy's sparse matrices where there is no GPU. The differences:

- complex arrays take every operator that is defined on them, and further operators have their
  names in ringcoll ("avg", "band", ...); a rank that does not need an array may pass None for it;
- a result is rounded once (see the README), and all ranks get the same bits;
- ``barrier`` also waits for what the calling rank has enqueued on its current stream;
- an ``out_array`` that is too small, and rows of an array in Fortran order, are refused;
- the ranks' sparse matrices must be of one format and dtype, and their calls are not part of a
  ``ringcoll.group()``: the sizes travel first, and the host waits for them.

Errors are those of :mod:`ringcoll.errors`, and each is a RuntimeError too, as CuPy's are.
"""

from __future__ import annotations

from ringcoll.cupyx.backend import NCCLBackend, RingcollBackend, init_process_group

__all__ = ["NCCLBackend", "RingcollBackend", "init_process_group"]
