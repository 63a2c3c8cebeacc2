# SPDX-License-Identifier: Apache-2.0
"""The operators' Python half: what csrc does not implement is registered here, by subject."""

# The imports register.
from . import autograd_library, family, heads, operators, packed  # noqa: F401

autograd_library.load()
family.register()
