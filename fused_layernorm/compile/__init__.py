# SPDX-License-Identifier: Apache-2.0
"""torch.compile(model, backend="fused_layernorm"): fused norms in an unchanged model."""
