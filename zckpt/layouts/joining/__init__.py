"""How the slices of tensor-parallel ranks make up whole tensors: the geometry, and the rules that say so."""
