# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: how fast the kernels are, next to PyTorch and to a plain copy. See README.md."""
