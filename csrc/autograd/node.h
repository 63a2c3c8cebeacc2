// What autograd's nodes are held by, and how they are made, in each release of torch.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/headeronly/version.h>

#include <memory>

namespace fused_layernorm {

using torch::autograd::Node;

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 13

using NodePtr = std::shared_ptr<Node>;

// deleteNode takes a long chain of nodes down one by one: were each to destroy the next, the stack
// would overflow.
template <class T>
std::shared_ptr<T> make_node() {
  return std::shared_ptr<T>(new T(), torch::autograd::deleteNode);
}

#else

using NodePtr = c10::intrusive_ptr<Node>;

template <class T>
c10::intrusive_ptr<T> make_node() {
  return c10::make_intrusive<T>();
}

#endif

}  // namespace fused_layernorm
