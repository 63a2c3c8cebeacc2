# SPDX-License-Identifier: Apache-2.0
"""torch.compile(model, backend="fused_layernorm"): fused norms in an unchanged model.

docs/architecture.md has the layers of this folder: backend.py is the entry, and rules.py says which
norms this package computes.
"""
