"""Where what is made once per machine is kept: exported graphs and compiled kernels."""
from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$WORLDMODEL_CACHE, or worldmodel_ros under the XDG cache folder."""
    if os.environ.get('WORLDMODEL_CACHE'):
        return Path(os.environ['WORLDMODEL_CACHE'])
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / 'worldmodel_ros'


def keep_compiled_kernels() -> None:
    """Has torch.compile and Triton keep what they compile there, unless the user has set other folders: by default the
    one's is under /tmp, and gone after every start of the machine. Before either compiles anything."""
    os.environ.setdefault('TORCHINDUCTOR_CACHE_DIR', str(cache_folder() / 'inductor'))
    os.environ.setdefault('TRITON_CACHE_DIR', str(cache_folder() / 'triton'))
