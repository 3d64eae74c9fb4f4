"""The machine and its rings for people: a matrix, words, a tree of text, a picture.

``labels`` names nodes, ``matrix``, ``words`` and ``tree`` are text. ``shapes`` are what a picture
consists of, ``layout`` places the nodes of a host, ``picture`` draws them with links and rings,
``legend`` explains them; ``files`` writes the picture.
"""
