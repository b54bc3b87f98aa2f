"""Which device each rank computes on, and with how many cores."""

import os

import torch

from tllm_core.errors import ConfigError


def device_of(name: str, rank: int, size: int) -> torch.device:
    """The device of one rank of several. Raises ConfigError where there is none."""
    device = _device("cuda" if name == "auto" and torch.cuda.is_available() else "cpu" if name == "auto" else name)
    if device.type != "cuda" or size == 1:
        return device
    if ":" in name:
        raise ConfigError(f"device {name!r} is one for all of {size} ranks; set it to 'cuda', and each takes its own")
    if size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size {size} needs {size} GPUs, and torch finds {torch.cuda.device_count()} here; set it lower,"
            " or device to 'cpu'"
        )
    return torch.device("cuda", rank)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device {name!r} is none that torch knows; try 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} is not usable: torch finds no CUDA device here; set device to 'cpu'")
    return device


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
