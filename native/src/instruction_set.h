// Which instruction set runs: the best one of the processor, or one that the environment names.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace offramp {

struct InstructionSet {
  const char* name;
  const Kernels& (*kernels)();
};

// Those that this processor has, the plainest first.
std::vector<InstructionSet> available_instruction_sets();

// By name; "" is the best one. Throws std::invalid_argument for a name that is not available.
InstructionSet find_instruction_set(const std::string& name);

}  // namespace offramp
