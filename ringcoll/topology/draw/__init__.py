"""The machine and its rings for people: a matrix, sentences, a tree of text, a picture.

``labels`` names nodes; ``matrix``, ``words`` and ``tree`` are text. Of a picture,
``shapes`` are the parts, ``layout`` places a host's nodes, ``edges`` their links and rings,
``picture`` puts hosts and legends together, ``files`` writes it.
"""
