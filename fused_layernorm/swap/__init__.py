# SPDX-License-Identifier: Apache-2.0
"""Swapping the norms of a model, and back: what is known of other libraries' classes, and how.

swapping.py has the functions, classes.py the classes of swapped modules, and registry.py says what
a module is. A class is known by the source of its forward (source.py): known.txt has a row for
each, with the forward that replaces it. Where a forward is made anew from a class's own source
(rewrite.py), modulated.py, heads.py and neighbours.py have the templates and what it calls.
"""
