// SPDX-License-Identifier: Apache-2.0
// Blocks whose teams have one row each and keep nothing for a next one: what few_rows and rows
// share.
#pragma once

#include "backward/warp.h"

namespace fused_layernorm {
namespace backward {

struct OneRowATeam : Launch {
  int width = 1;
  int vecs = 2;
  int team_threads = 1;   // on one row: a logical warp's lanes, or whole warps
  bool by_lanes = false;  // the team is a logical warp

  template <typename Json>
  void describe(Json& json) const {
    json.add("width", width).add("vecs", vecs).add("team_threads", team_threads);
    json.add("teams", threads / team_threads).add("by_lanes", by_lanes);
  }
};

}  // namespace backward
}  // namespace fused_layernorm
