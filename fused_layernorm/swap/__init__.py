# SPDX-License-Identifier: Apache-2.0
"""Swapping the norms of a model, and back: what is known of other libraries' classes, and how.

swapping.py has the functions, classes.py the classes of swapped modules, and registry.py says what
a module is. A class is known by the source of its forward (source.py): LayerNorms stand in
table.py, with the forwards that replace theirs in forwards.py and modulated.py; rms.py,
channels.py, groups.py and liger.py have both for their kinds. Where a forward is made anew from a
class's own source (rewrite.py), modulated.py, rotations.py and neighbours.py have the templates.
"""
