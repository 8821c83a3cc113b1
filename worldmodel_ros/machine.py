"""Describes the machine and the software that a measurement was made with."""
from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ('worldmodel-ros', 'ros-jazzy-rclpy', 'ros-jazzy-rmw-fastrtps-cpp', 'torch', 'onnxruntime',
            'numpy', 'mujoco')


def machine() -> dict:
    """Return processor, cores this process may use, memory, GPUs, interpreter and operating system."""
    return {
        'cpu': _field('/proc/cpuinfo', 'model name') or platform.processor() or platform.machine(),
        'cores': len(os.sched_getaffinity(0)),
        'memory_gib': _memory_gib(),
        'gpus': _gpus(),
        'python': platform.python_version(),
        'platform': platform.platform(),
    }


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str | None]:
    """Return the installed version of each distribution package; None: not installed as a Python package."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _field(path: str, key: str) -> str:
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(':')
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass  # not Linux
    return ''


def _gpus() -> list[str]:
    torch = sys.modules.get('torch')  # a process that used a GPU has imported it; others should not pay for the import
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _memory_gib() -> float | None:
    kib = _field('/proc/meminfo', 'MemTotal').split()
    return round(int(kib[0]) / 2 ** 20, 1) if kib else None
