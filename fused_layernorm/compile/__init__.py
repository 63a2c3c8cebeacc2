# SPDX-License-Identifier: Apache-2.0
"""torch.compile(model, backend="fused_layernorm"): fused norms in an unchanged model.

reading     what a node of a graph computes
patterns    the patterns, as expressions
effects     writes into tensors and changes of modes, which forbid a replacement
sites       the norms of a graph, each with what surrounds it
autocast    results that autocast casts to half precision
replace     whether a site may become one operator, and the replacement
rotations   rotations of q and k, with the norms before them
rules       which sites this package computes, as data with the measurements
graph_pass  all of these, applied to a graph and its sub-graphs
backend     the entry points: the backend of torch.compile, fuse and explain
"""

from .backend import explain, fuse

__all__ = ["explain", "fuse"]
