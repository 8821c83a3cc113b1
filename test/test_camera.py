"""Images of another camera are shown to a model as its own would have shown them, or not at all."""
import math
from dataclasses import replace
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
from camera_infos import camera_info

from worldmodel_ros.evaluate.control.cameras import CAMERAS
from worldmodel_ros.inputs.camera import CameraError, Correction, Lens, View, pinhole
from worldmodel_ros.inputs.images import ImageError, fit, read
from worldmodel_ros.model.presets import SIMULATED, TINY, Preset
from worldmodel_ros.sim import scene
from worldmodel_ros.sim.cameras import WIDE, WIDER
from worldmodel_ros.sim.world import World

SIZE, FOV = (64, 64), 90.0
LENSES = {'plumb_bob': (-0.05, 0.003, 0.001, -0.001, 0.0), 'equidistant': (-0.02, 0.001, 0.0, 0.0),
          'rational_polynomial': (0.3, 0.02, 0.0, 0.0, 0.0, 0.35, 0.03, 0.0)}


def lens(camera):
    return Lens(camera.size, (camera.focal, camera.focal), camera.centre, 'plumb_bob', camera.distortion)


def scenery(directions):
    """Return the colour, smooth over directions (..., 2), of a world that is infinitely far away."""
    x, y = directions[..., 0], directions[..., 1]
    waves = np.stack([np.sin(5 * x + 1), np.cos(4 * y), np.sin(3 * x - 4 * y)], -1)
    return np.rint(127.5 + 120 * waves).astype(np.uint8)


def seen(view_of, pitch=0.0):
    """Return what a camera, pitched down by so many degrees, sees of the scenery, by undistorting each of its pixels."""
    h, w = view_of.size
    pixels = np.stack(np.meshgrid(np.arange(w), np.arange(h)), 2).reshape(-1, 1, 2).astype(float)
    undistort = cv2.fisheye.undistortPoints if view_of.model == 'equidistant' else cv2.undistortPoints
    slopes = undistort(pixels, view_of.matrix, np.array(view_of.coefficients)).reshape(h, w, 2)
    x, y, tilt = slopes[..., 0], slopes[..., 1], math.radians(pitch)
    ahead = math.cos(tilt) - y * math.sin(tilt)
    return scenery(np.stack([x / ahead, (y * math.cos(tilt) + math.sin(tilt)) / ahead], -1))


@pytest.mark.parametrize('model', LENSES)
def test_what_is_shown_is_what_the_trained_camera_would_have_seen(model):
    camera = Lens.of(camera_info((480, 640), 112.0, LENSES[model], model))
    expected = seen(pinhole(FOV, SIZE)).astype(int)
    shown = View(camera, FOV, SIZE)(seen(camera), SIZE)
    assert shown.dtype == np.uint8 and shown.shape == (64, 64, 3)
    assert np.abs(shown - expected).mean() < 1.0
    assert np.abs(fit(seen(camera), SIZE) - expected).mean() > 5.0  # without the correction


def test_simulated_wide_cameras_show_the_room_as_the_trained_one_does():
    world = World(7_000_001, randomise=False)
    trained = cv2.resize(world.draw_camera((512, 512), FOV), SIZE, interpolation=cv2.INTER_AREA).astype(int)
    for camera in (WIDE, WIDER):
        image = camera.render(world)
        assert image.shape == (480, 640, 3)
        assert np.abs(View(lens(camera), FOV, SIZE)(image, SIZE) - trained).mean() < 1.0
    assert np.abs(fit(WIDER.render(world), SIZE) - trained).mean() > 5.0
    assert np.abs(CAMERAS['camera_higher'].look(world, SIZE) - trained).mean() > 3.0
    assert np.array_equal(world.render(SIZE), World(7_000_001, randomise=False).render(SIZE))  # its own camera is as it was
    # The images of small_tiles, as a forecast gets them, are nearer to the truth than those that it was trained on.
    assert np.abs(CAMERAS['camera_128'].look(world, SIZE) - trained).mean() < 1.0 < np.abs(world.render(SIZE) - trained).mean()


@pytest.mark.parametrize('size', [(64, 64), (480, 480), (480, 640)])
def test_a_camera_that_differs_by_a_crop_is_treated_as_ever(size):
    across = 2 * math.degrees(math.atan(size[1] / size[0]))
    view = View(Lens.of(camera_info(size, across)), FOV, SIZE)
    image = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    assert view.is_crop and np.array_equal(view(image, SIZE), fit(image, SIZE))
    assert view.used == pytest.approx(size[0] / size[1])
    words = view.in_words()
    assert ('25% of the image is cut off' in words) == (size == (480, 640)), words


def test_what_is_cut_off_is_told():
    words = View(Lens.of(camera_info((480, 640), 110.0)), FOV, SIZE).in_words()
    assert words == ('640 x 480 pixels, 110 x 93.9 degrees: warped to the 90 x 90 degrees of training, 35% of the image is '
                     'cut off')


@pytest.mark.parametrize(('across', 'distortion', 'missing'), [(62.0, (), 'has 62 x 48.5'), (90.0, (), 'x 73.7'),
                                                                (110.0, (-0.35, 0.0, 0.0, 0.0, 0.0), 'is not in')])
def test_a_camera_that_does_not_see_the_trained_view_is_refused_with_words(across, distortion, missing):
    with pytest.raises(CameraError, match=f'trained with a view of 90 x 90 degrees.*{missing}'):
        View(Lens.of(camera_info((480, 640), across, distortion)), FOV, SIZE)


def test_where_the_polynomial_comes_back_a_lens_ends():
    camera = Lens.of(camera_info((480, 640), 110.0, (-0.25, 0.0, 0.0, 0.0, 0.0)))
    assert math.tan(camera.reach) == pytest.approx(math.sqrt(1 / 0.75), abs=0.01)  # 1 + 3 k1 r^2 = 0


def test_rectified_images_have_the_projection_of_p_and_no_distortion():
    info = camera_info((480, 640), 110.0, LENSES['plumb_bob'])
    info.p[0] = info.p[5] = 200.0
    assert Lens.of(info, rectified=True) == Lens((480, 640), (200.0, 200.0), (319.5, 239.5))


def test_binning_and_a_region_of_interest_move_the_centre():
    roi = SimpleNamespace(x_offset=80, y_offset=60, height=360, width=480)
    found = Lens.of(camera_info((480, 640), 90.0, binning_x=2, binning_y=2, roi=roi))
    assert (found.size, *found.focal, *found.centre) == ((180, 240), *map(pytest.approx, (160.0, 160.0, 119.5, 89.5)))


@pytest.mark.parametrize(('model', 'd'), [('fov', [0.9]), ('plumb_bob', [0.1]), ('plumb_bob', [math.nan] * 5)])
def test_a_distortion_that_is_not_known_is_refused(model, d):
    with pytest.raises(CameraError, match='camera'):
        Lens.of(camera_info((480, 640), 110.0, d, model))


def message(image):
    height, width, _ = image.shape
    return SimpleNamespace(height=height, width=width, encoding='rgb8', step=3 * width, data=image.tobytes())


def test_a_correction_follows_the_newest_camera_info():
    correction = Correction(FOV, SIZE)
    wide = camera_info((480, 640), 110.0, LENSES['plumb_bob'])
    image = message(seen(Lens.of(wide)))
    assert correction.view is fit and np.array_equal(read(image, SIZE, correction), read(image, SIZE))
    assert 'not heard' in correction.in_words()
    assert correction.take(wide) and not correction.take(wide)
    assert not np.array_equal(read(image, SIZE, correction.view), read(image, SIZE))
    assert correction.take(camera_info((480, 640), 60.0))
    with pytest.raises(ImageError, match='take a wider lens') as refused:
        read(image, SIZE, correction)
    assert refused.value.kind == 'camera' and correction.in_words() == correction.refusal
    assert correction.take(wide) and not correction.refusal
    with pytest.raises(ImageError, match='camera_info is of 640 x 480'):
        read(message(np.zeros((240, 320, 3), np.uint8)), SIZE, correction)
    assert correction.take(camera_info((480, 640), 110.0, k=[0.0] * 9))
    assert 'not calibrated' in correction.in_words() and np.array_equal(read(image, SIZE, correction), read(image, SIZE))


def test_the_trained_camera_changes_nothing_nor_does_any_where_it_is_not_known():
    assert not Correction(FOV, SIZE).take(camera_info(SIZE, 90.0))
    unknown = Correction(None, SIZE)
    assert not unknown.take(camera_info((480, 640), 60.0)) and not unknown.refusal
    assert 'does not tell' in unknown.in_words()


def test_the_trained_camera_is_the_simulators_and_is_in_the_description_of_a_model():
    assert (scene.CAMERA_FOV_DEG, scene.CAMERA_Z, pytest.approx(math.degrees(scene.CAMERA_PITCH))) == (
        SIMULATED.vertical_fov, SIMULATED.height, SIMULATED.pitch)
    assert Preset.from_dict(TINY.to_dict()) == TINY and TINY.camera == SIMULATED
    before = {name: value for name, value in TINY.to_dict().items() if name != 'camera'}
    assert Preset.from_dict(before) == replace(TINY, camera=None)
    for broken in ({'vertical_fov': 90.0}, {**TINY.to_dict()['camera'], 'pitch': 'down'}, 90.0):
        with pytest.raises(ValueError, match='camera'):
            Preset.from_dict({**before, 'camera': broken})


def test_a_known_pitch_is_corrected_where_the_camera_sees_enough():
    expected, camera = seen(pinhole(FOV, SIZE)).astype(int), Lens.of(camera_info((480, 640), 125.0))
    down = seen(camera, pitch=5.0)
    assert np.abs(View(camera, FOV, SIZE, pitch=5.0)(down, SIZE) - expected).mean() < 1.0
    assert np.abs(View(camera, FOV, SIZE)(down, SIZE) - expected).mean() > 5.0
    with pytest.raises(CameraError):
        View(lens(WIDE), FOV, SIZE, pitch=5.0)

    correction, told = Correction(FOV, SIZE), camera_info((480, 640), 125.0)
    assert not correction.turn(5.0) and correction.take(told) and correction.pitch == 5.0
    assert 'turned 5.0 degrees up' in correction.in_words()
    assert not correction.turn(5.05) and correction.turn(-5.0) and 'turned 5.0 degrees down' in correction.in_words()
    assert correction.turn(25.0) and correction.pitch == 0.0 and not correction.refusal  # not seen: left as it is
    assert not Correction(FOV, SIZE).turn(0.4)


def test_a_lens_by_which_no_direction_has_a_pixel_of_its_own_is_refused():
    with pytest.raises(CameraError, match='no direction has a pixel of its own'):
        Lens((120, 160), (100.0, 100.0), (80.0, 60.0), 'equidistant', (-1e9, 0.0, 0.0, 0.0))
