# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject.

load        the binary and the operators that it registers; what serves calls that no kernel takes
arguments   what a call must satisfy: every check and every error message
formulas    calls as records, and the arithmetic as differentiable expressions
autograd    what derivatives and autocast are made of: the first order runs on the operators
family      what follows from a formula: implementations, derivatives, autocast, fakes
vmap        the batch as one more leading dimension
operators   the operators of norms: of rows, of groups of channels, and gated
heads       the operators of q and k by heads, normalized and rotated
packed      the same of q, k and v in one tensor
aten_forward  variants of the operators: compilers fuse their forward pass with its neighbours
autograd_library  autograd and autocast in C++, used instead if there is a library for this torch
"""

from . import (  # noqa: F401  (the imports register)
    aten_forward,
    autograd_library,
    family,
    heads,
    operators,
    packed,
)

autograd_library.load()
family.register()
