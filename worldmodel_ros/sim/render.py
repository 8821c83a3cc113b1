"""Headless rendering of any world: one OpenGL context per thread, for all its worlds and image sizes."""
import threading

import numpy as np

from worldmodel_ros.sim.gl import GLContext, mujoco

_MAX_GEOMS = 128
_local = threading.local()


class Renderer:
    """An OpenGL context with the textures that all scenes share. Belongs to the thread that created it."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self._gl = GLContext(64, 64)  # images are drawn off-screen, in a buffer of their own
        self._gl.make_current()
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene = mujoco.MjvScene(model, _MAX_GEOMS)
        self._option = mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED

    def draw(
        self, model: mujoco.MjModel, data: mujoco.MjData, camera: int, size: tuple[int, int]
    ) -> np.ndarray:
        """Return the view of camera number ``camera``, uint8 (H, W, 3) RGB, for a ``size`` of (H, W) pixels."""
        height, width = size
        self._gl.make_current()
        if (self._context.offWidth, self._context.offHeight) != (width, height):
            mujoco.mjr_resizeOffscreen(width, height, self._context)
        self._camera.fixedcamid = camera
        mujoco.mjv_updateScene(
            model, data, self._option, None, self._camera, mujoco.mjtCatBit.mjCAT_ALL.value, self._scene)
        rect = mujoco.MjrRect(0, 0, width, height)
        mujoco.mjr_render(rect, self._scene, self._context)
        picture = np.empty((height, width, 3), np.uint8)
        mujoco.mjr_readPixels(picture, None, rect, self._context)
        return picture[::-1]  # OpenGL's first row is the lowest


def thread_renderer(model: mujoco.MjModel) -> Renderer:
    """Return this thread's renderer, created with ``model`` if there is none yet."""
    renderer = getattr(_local, 'renderer', None)
    if renderer is None:
        renderer = _local.renderer = Renderer(model)
    return renderer
