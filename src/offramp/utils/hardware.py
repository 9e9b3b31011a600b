"""The machine in a line, beside every time that was measured; and how precisely it likes to compute."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def hardware() -> str:
    """The processor, cores in use and memory, in a line."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        named = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0].split(":", 1)[1].strip() if named else name
    flags = "AVX-512 " if "AVX512" in torch.backends.cpu.get_cpu_capability() else ""
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    threads = torch.get_num_threads()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 if info.is_file() else 0.0
    return f"{name}, {flags}{threads} thread{'s' * (threads > 1)}, {memory:.0f} GiB, {device}"


def best_precision() -> str:
    """bf16 where the processor (or GPU) multiplies it natively."""
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    if not torch.backends.mkldnn.is_available():
        return "fp32"
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"
