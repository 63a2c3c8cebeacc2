# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject.

load        the binary and the operators that it registers; a call as a record
arguments   what a call must satisfy: every check and every error message
formulas    the arithmetic as differentiable expressions
autograd    what derivatives are made of: the first order runs on the operators
autocast    the dtypes that autocast gives
family      what follows from a formula: implementations, derivatives, autocast, fakes
vmap        the batch as one more leading dimension
fallback    the same formulas on CUDA, for calls that no kernel takes
operators   the operators of norms over rows, and the description of a call that all of them serve
heads       the operators of q and k by heads, normalized and rotated
packed      the same of q, k and v in one tensor
groups      the operators of groups of channels
gated       the operators of gated RMSNorm
aten_forward  variants of the operators: compilers fuse their forward pass with its neighbours
autograd_library  autograd and autocast in C++, used instead if there is a library for this torch
"""

from . import (  # noqa: F401  (the imports register)
    aten_forward,
    autograd_library,
    family,
    gated,
    groups,
    heads,
    operators,
    packed,
)

autograd_library.load()
family.register()
