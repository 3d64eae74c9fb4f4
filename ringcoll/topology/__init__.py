"""The machine as a graph, and the rings it is worth; knows nothing of plans.

``system`` holds the types of the graph, ``rings`` those of what a search finds.
"""
