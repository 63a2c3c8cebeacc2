# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject."""

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
