#include "instruction_set.h"

#include <stdexcept>

namespace offramp {

std::vector<InstructionSet> available_instruction_sets() {
  std::vector<InstructionSet> available = {{"portable", portable_kernels}};
#ifdef OFFRAMP_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return available;
  available.push_back({"avx2", avx2_kernels});
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl")) {
    return available;
  }
  available.push_back({"avx512", avx512_kernels});
  if (!__builtin_cpu_supports("avx512vnni")) return available;
  available.push_back({"avx512_vnni", avx512_vnni_kernels});
  if (__builtin_cpu_supports("avx512bf16")) available.push_back({"avx512_bf16", avx512_bf16_kernels});
#endif
  return available;
}

InstructionSet find_instruction_set(const std::string& name) {
  const std::vector<InstructionSet> available = available_instruction_sets();
  if (name.empty()) return available.back();
  std::string known;
  for (const InstructionSet& set : available) {
    if (name == set.name) return set;
    known += known.empty() ? set.name : std::string(", ") + set.name;
  }
  throw std::invalid_argument("the instruction set '" + name + "' is not available here; use one of: " + known);
}

}  // namespace offramp
