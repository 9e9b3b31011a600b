"""The C++ engine on the CPU (package offramp-native): kernels, exit heads and whole exit rules without Python between."""

from offramp.engines.native.engine import NativeEngine, make, unserved_reason, versions

__all__ = ["NativeEngine", "make", "unserved_reason", "versions"]
