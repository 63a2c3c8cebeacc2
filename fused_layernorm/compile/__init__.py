"""torch.compile(model, backend="fused_layernorm"): fused layer norms in a model as it is.

reading     what a node of a graph computes
patterns    the patterns, as expressions
effects     writes into tensors and changes of modes, which forbid a replacement
sites       the layer norms of a graph, each with what surrounds it
replace     whether a site may become one operator, and the replacement
rules       which of them are this package's, as data with the measurements
graph_pass  all of it, over a graph and its sub-graphs
backend     the ways in: the backend of torch.compile, fuse and explain
"""

from .backend import explain, fuse

__all__ = ["explain", "fuse"]
