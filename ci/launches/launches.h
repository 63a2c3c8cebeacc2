// SPDX-License-Identifier: Apache-2.0
// What runtime.cpp tells problems.cpp.
#pragma once

#include <string>
#include <vector>

extern std::vector<std::string> launches;  // since they were last cleared, in order
extern int most_shared_memory;             // of a block, in bytes
extern bool blocks_meet;                   // else clusters and cooperative launches are refused
