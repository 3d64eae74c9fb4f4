"""The machine as a graph, and its best rings; knows nothing of plans.

``system`` has the types of the graph, ``rings`` those of a search's result. A ``document`` is read
from a file (``files``), made for a known machine (``presets``) or detected on this one
(``detect``); ``build`` makes the graph of it, ``search`` finds its rings over ``paths``, ``draw``
shows both.
"""
