"""The operators' Python half: what csrc does not implement is registered here, a file a subject.

load        the binary and the operators that it registers
operators   the operators' arguments and results by name
arguments   what a call must satisfy: every check and every sentence
composite   the same results through PyTorch's operators, for devices without kernels
fakes       shapes and dtypes without data, for torch.compile and meta tensors
vmap        one more leading dimension
formulas    the same functions as differentiable expressions
autograd    derivatives, of which the first order runs on the operators
autocast    the dtypes that autocast gives
"""

from . import autocast, autograd, composite, fakes, vmap  # noqa: F401  (register)

autograd.register()
autocast.register()
