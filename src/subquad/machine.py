"""This machine: how much memory is free."""

import os
from pathlib import Path

import torch


def free_bytes(device: str | torch.device) -> int:
    """Memory that can still be had: of the GPU, or of this machine and of the container we are in."""
    if torch.device(device).type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    info = Path("/proc/meminfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("MemAvailable"):
            limits.append(int(line.split()[1]) * 1024)
    most, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if most.exists() and used.exists() and most.read_text().strip() != "max":
        limits.append(int(most.read_text()) - int(used.read_text()))
    return min(limits)
