"""The C++ engine on the CPU (package offramp-native): kernels, exit heads, and whole exit rules in one call."""

from offramp.engines.native.engine import NativeEngine, make, unserved_reason, versions
from offramp.engines.native.library import import_native, instruction_set

__all__ = ["NativeEngine", "import_native", "instruction_set", "make", "unserved_reason", "versions"]
