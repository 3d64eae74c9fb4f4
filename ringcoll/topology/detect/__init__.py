"""What this machine is, read from NVML, CUDA and the kernel, as a document in NCCL's form.

``facts`` is what was read, ``describe`` concludes from it, ``detection`` does both and keeps the
result, ``measure`` corrects bandwidths by timing copies.
"""

from ringcoll.topology.detect.collect import collect
from ringcoll.topology.detect.describe import document_of
from ringcoll.topology.detect.detection import detect
from ringcoll.topology.detect.facts import Facts
from ringcoll.topology.detect.measure import measure

__all__ = ["Facts", "collect", "detect", "document_of", "measure"]
