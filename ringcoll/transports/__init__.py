"""How the memory of a peer is made reachable."""
