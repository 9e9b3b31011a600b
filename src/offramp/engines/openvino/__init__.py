"""OpenVINO on the CPU: layers, exit heads and predictors compiled to graphs and cached."""

from offramp.engines.openvino.engine import OpenVINOEngine, make, versions

__all__ = ["OpenVINOEngine", "make", "versions"]
