"""How much host memory the ranks of a node take until a model is trained: built, filled with weights, sharded."""
