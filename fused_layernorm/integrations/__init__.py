# SPDX-License-Identifier: Apache-2.0
"""What other libraries are told of this package, once a program imports them."""
