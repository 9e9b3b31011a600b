"""The C++ engine on the CPU (package offramp-native): kernels, exit heads, and whole exit rules in one call."""

from offramp.engines.native.engine import NativeEngine, make, unserved_reason, versions
from offramp.engines.native.library import instruction_set, library

__all__ = ["NativeEngine", "instruction_set", "library", "make", "unserved_reason", "versions"]
