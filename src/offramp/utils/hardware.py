"""A description of the machine, stored beside every measured time; and the precision that is fast on it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def hardware() -> str:
    """Return processor, threads in use, memory and GPU in one line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = models[0].split(":", 1)[1].strip() if models else name
    flags = "AVX-512 " if "AVX512" in torch.backends.cpu.get_cpu_capability() else ""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if info.is_file() else 0.0
    return f"{name}, {flags}{threads} thread{'s' * (threads > 1)}, {memory:.0f} GiB, {device}"


def best_precision() -> str:
    """Return bf16 if the processor (or GPU) multiplies it natively, else fp32."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    if not torch.backends.mkldnn.is_available():
        return "fp32"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
