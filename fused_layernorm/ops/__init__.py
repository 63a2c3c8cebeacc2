# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject.

load        the binary and the operators that it registers
operators   the operators' arguments and results by name
arguments   what a call must satisfy: every check and every error message
composite   the same results through PyTorch's operators, for devices without kernels
fakes       shapes and dtypes without data, for torch.compile and meta tensors
vmap        the batch as one more leading dimension
formulas    the same functions as differentiable expressions
autograd    what derivatives are made of: the first order runs on the operators
autocast    the dtypes that autocast gives
fallback    the same formulas on CUDA, for calls that no kernel takes
family      what families of operators have in common: derivatives, autocast, vmap, registration
norms       the operators of norms over rows, as families
heads       the operators of q and k by heads, normalized and rotated: all of the above in one file
groups      the operators of groups of channels: all of the above in one file
gated       the operators of gated RMSNorm: all of the above in one file
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
    norms,
)

family.register(beside_library=autograd_library.load())
