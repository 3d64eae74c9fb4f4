"""The machine and its rings for people: a matrix, words, a tree of text, a picture.

``labels`` names nodes, ``forest`` says what hangs from what; ``matrix``, ``words`` with ``limits``,
and ``tree`` are text. Of a picture, ``shapes`` are the parts, ``layout`` places a host's nodes,
``joints`` and ``ways`` its links, ``bands`` makes these as wide as they carry, with the rings in
colour, ``host`` and ``picture`` put all together; ``files`` writes the picture.
"""
