# SPDX-License-Identifier: Apache-2.0
"""Swapping the norms of a model, and back: what is known of other libraries' classes, and how.

swapping.py has the functions, classes.py the classes of swapped modules, and registry.py says what
a module is. A class is known by the source of its forward (source.py): LayerNorms stand in
table.py, with the forwards that replace theirs in forwards.py and modulated.py; rms.py,
channels.py, groups.py, liger.py and rotations.py have both for their kinds, neighbours.py for the
activations behind norms.
"""
