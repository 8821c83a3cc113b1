"""Selects headless OpenGL for MuJoCo before ``mujoco`` is imported; if it is missing, names the remedy."""
import os
from importlib.util import find_spec

# ``mujoco`` reads MUJOCO_GL when it is first imported. By default it takes GLFW, which needs a display.
_BACKEND = os.environ.setdefault('MUJOCO_GL', 'osmesa').strip().lower()
# Threads of its own do not make Mesa faster for small images, and each image then waits for the busiest core.
os.environ.setdefault('LP_NUM_THREADS', '0')
_PACKAGES = {'osmesa': 'libosmesa6', 'egl': 'libegl1'}

if find_spec('triton'):
    # Mesa's renderer (OSMesa, and EGL without a GPU) and Triton both contain LLVM, and Triton's crashes the process if it
    # is loaded after Mesa's. PyTorch loads Triton, if installed, whenever it exports or compiles a model.
    import triton  # noqa: F401

try:
    import mujoco

    if _BACKEND == 'egl':
        from mujoco.egl import GLContext
    elif _BACKEND == 'osmesa':
        from mujoco.osmesa import GLContext
    else:
        from mujoco.rendering.classic.gl_context import GLContext
except (AttributeError, ImportError, OSError) as error:
    # AttributeError is how PyOpenGL reports a missing library.
    raise ImportError(
        f'MuJoCo cannot load its OpenGL back end (MUJOCO_GL={_BACKEND}): {error}. '
        f'Install it with "apt-get install {_PACKAGES.get(_BACKEND, "libosmesa6")}" and '
        '"pip install mujoco", or set MUJOCO_GL to "osmesa" (software) or "egl" (GPU).') from error

__all__ = ['GLContext', 'mujoco']
