// SPDX-License-Identifier: Apache-2.0
// The namespace of the operators, torch.ops.<namespace>, which fused_layernorm/ops/load.py has too.
#pragma once

#define FUSED_LAYERNORM_NAMESPACE fused_layernorm

#define FUSED_LAYERNORM_AS_STRING_(text) #text
#define FUSED_LAYERNORM_AS_STRING(text) FUSED_LAYERNORM_AS_STRING_(text)
