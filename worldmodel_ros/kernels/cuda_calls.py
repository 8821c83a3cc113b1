"""What calls of CUDA by its Python bindings have in common."""
from __future__ import annotations

from typing import Any


class DeviceMemory:
    """Memory on a GPU that PyTorch did not allocate, or not as such a tensor, for ``torch.as_tensor``; ``kind`` of its numbers
    as in numpy's ``typestr``."""

    def __init__(self, address: int, count: int, kind: str):
        self.__cuda_array_interface__ = {'data': (address, False), 'shape': (count,), 'typestr': kind, 'version': 3}


def done(result: tuple, which: int = 0) -> Any:
    """Return one of the values of a call of the runtime or the driver, None if it has none. Raises RuntimeError with the name
    of the error."""
    error, *values = result
    if error != type(error)(0):
        raise RuntimeError(f'CUDA: {error.name}')
    return values[which] if values else None
