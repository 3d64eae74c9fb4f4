"""The machine as a graph, and the rings it is worth; knows nothing of plans.

``system`` holds the types of the graph, ``rings`` those of what a search finds. A ``document`` is
read from a file (``files``), made for a known machine (``presets``) or of this one (``detect``);
``build`` makes the graph of it, ``search`` finds its rings over ``paths``, ``draw`` shows both.
"""
