// SPDX-License-Identifier: Apache-2.0
// The namespace of the operators, torch.ops.<namespace>. A build may be given another one, so that
// several builds of the package can be loaded into one process: ci/hf_kernels.py makes such builds,
// and gives fused_layernorm/ops/load.py the same name.
#pragma once

#ifndef FUSED_LAYERNORM_NAMESPACE
#define FUSED_LAYERNORM_NAMESPACE fused_layernorm
#endif

#define FUSED_LAYERNORM_AS_STRING_(text) #text
#define FUSED_LAYERNORM_AS_STRING(text) FUSED_LAYERNORM_AS_STRING_(text)
