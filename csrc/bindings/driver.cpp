// SPDX-License-Identifier: Apache-2.0
// Reads the driver's version once, while the library loads, and registers the CUDA kernels unless
// the driver is too old for them.
#include "bindings/driver.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/namespace.h"

#ifdef FUSED_LAYERNORM_CUDA
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#endif

namespace fused_layernorm {

#ifdef FUSED_LAYERNORM_CUDA
namespace {

using torch::stable::detail::StableLibrary;

// CUDA's versions as numbers, as the driver and the runtime give them: 12040 is 12.4.
constexpr int64_t kRuntime = CUDART_VERSION;
constexpr int64_t kLeastDriver = FUSED_LAYERNORM_LEAST_DRIVER;

std::string in_words(int64_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The branch of drivers in which a version of CUDA came out.
std::string branch_of(int64_t version) {
  if (version == 12000) return " (R525)";
  if (version == 12040) return " (R550)";
  if (version == 13000) return " (R580)";
  return "";
}

// The newest version of CUDA that this machine's driver supports, or 0 without a driver. The query
// does not initialise the driver, so a process may still fork after the import and use CUDA in its
// child.
int64_t ask_driver() {
  void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (driver == nullptr) return 0;
  const auto get_version = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDriverGetVersion"));
  int version = 0;
  if (get_version != nullptr && get_version(&version) != 0) version = 0;
  dlclose(driver);
  return version;
}

// The driver's version and the registration that follows from it.
struct Driver {
  int64_t version = 0;
  std::unique_ptr<StableLibrary> kernels;

  bool too_old() const { return version != 0 && version < kLeastDriver; }

  void use(int64_t of_driver) {
    version = of_driver;
    if (too_old()) {
      kernels.reset();
    } else if (kernels == nullptr) {
      kernels = std::make_unique<StableLibrary>(
          StableLibrary::Kind::IMPL, FUSED_LAYERNORM_AS_STRING(FUSED_LAYERNORM_NAMESPACE), "CUDA",
          __FILE__, __LINE__);
      register_cuda_kernels(*kernels);
    }
  }
};

// Never destroyed, because the dispatcher may be destroyed first when the process exits.
Driver& driver() {
  static auto* const instance = new Driver;
  return *instance;
}

// Initialised while the library loads.
[[maybe_unused]] const bool registered = (driver().use(ask_driver()), true);

void force_driver_version(std::optional<int64_t> version) {
  driver().use(version ? *version : ask_driver());
}

}  // namespace

bool driver_is_too_old() { return driver().too_old(); }

std::string driver_problem() {
  if (!driver_is_too_old()) return "";
  const int64_t version = driver().version;
  std::string way_out = "update the driver";
  if (kRuntime >= 13000 && version >= 12040) {
    way_out += ", install the released wheel, or build the package with a CUDA 12 toolkit";
  } else if (version >= 12000) {
    way_out += ", or build the package with a CUDA 12 toolkit and FUSED_LAYERNORM_COMPRESS=speed";
  }
  return "fused_layernorm's kernels, built with CUDA " + in_words(kRuntime) +
         ", need a driver for CUDA " + in_words(kLeastDriver) + branch_of(kLeastDriver) +
         " or newer; this machine's is for CUDA " + in_words(version) +
         ", so CUDA tensors take PyTorch's own operators, which are slower. Way out: " + way_out;
}

#else

std::string driver_problem() { return ""; }

namespace {
int64_t kernel_table() { return 0; }
void force_driver_version(std::optional<int64_t>) {
  throw std::runtime_error("_force_driver_version: this build has no CUDA kernels");
}
}  // namespace

#endif

}  // namespace fused_layernorm

STABLE_TORCH_LIBRARY_FRAGMENT(FUSED_LAYERNORM_NAMESPACE, m) {
  // Empty unless the driver is too old for the CUDA kernels.
  m.def("_driver_problem() -> str");
  // The address of the table of call/description.h; 0 in a build without CUDA kernels.
  m.def("_kernel_table() -> int");
  // For tests: behaves as under a driver of this version (12020 for CUDA 12.2, 0 for no driver).
  // None stands for the real version.
  m.def("_force_driver_version(int? version) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(FUSED_LAYERNORM_NAMESPACE, CompositeExplicitAutograd, m) {
  m.impl("_driver_problem", TORCH_BOX(&fused_layernorm::driver_problem));
  m.impl("_kernel_table", TORCH_BOX(&fused_layernorm::kernel_table));
  m.impl("_force_driver_version", TORCH_BOX(&fused_layernorm::force_driver_version));
}
