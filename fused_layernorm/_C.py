# SPDX-License-Identifier: Apache-2.0
"""Lets `import fused_layernorm._C` work; importing the package has already loaded the binary."""
