"""Images to RGB at the model's size: encodings, padding, cropping, and everything that must be refused."""
import array
import struct
import zlib
import importlib.util
import sys

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pixel_encodings import ALIKE, EXACT, uyvy
from sensor_msgs.msg import CompressedImage, Image

from worldmodel_ros.inputs import images
from worldmodel_ros.inputs.images import ImageError, compressed_to_rgb, fit, to_rgb
from worldmodel_ros.nodes.common.messages import to_jpeg

SIZE = (64, 64)


def picture(height=64, width=64):
    """A smooth colour gradient, uint8 (H, W, 3) RGB."""
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([255 * x / width, 255 * y / height, 128 + 60 * np.sin(x / 9)], 2).astype(np.uint8)


def message(pixels, encoding, padding=0):
    """An image of pixels (H, W) or (H, W, C), with unused bytes at the end of each row."""
    height, width = pixels.shape[:2]
    rows = np.pad(pixels.reshape(height, -1), ((0, 0), (0, padding)), constant_values=77)
    return Image(height=height, width=width, encoding=encoding, step=rows.shape[1],
                 data=array.array('B', rows.tobytes()))


@pytest.mark.parametrize('padding', [0, 10])
@pytest.mark.parametrize('encoding', EXACT)
def test_colour_encodings_are_read_exactly(encoding, padding):
    rgb = to_rgb(message(EXACT[encoding](picture()), encoding, padding), SIZE)
    assert rgb.dtype == np.uint8 and rgb.flags.c_contiguous
    assert np.array_equal(rgb, picture())


@pytest.mark.parametrize('padding', [0, 10])
@pytest.mark.parametrize('encoding', ALIKE)
def test_raw_sensor_encodings_are_read_with_the_right_colours(encoding, padding):
    rgb = to_rgb(message(ALIKE[encoding](picture()), encoding, padding), SIZE)
    error = np.abs(rgb.astype(int) - picture())[4:-4, 4:-4]
    assert error.mean() < 4.0, error.mean()


def test_grey_images_become_grey_rgb():
    grey = picture()[..., 0]
    rgb = to_rgb(message(grey, 'mono8', 3), SIZE)
    assert np.array_equal(rgb, np.repeat(grey[..., None], 3, 2))


def test_wide_images_lose_their_sides_and_are_averaged():
    pixels = np.zeros((120, 160, 3), np.uint8)
    pixels[:, 20:140] = picture(120, 120)
    expected = cv2.resize(picture(120, 120), (64, 64), interpolation=cv2.INTER_AREA)
    assert np.array_equal(to_rgb(message(pixels, 'rgb8'), SIZE), expected)


def test_high_images_lose_top_and_bottom():
    pixels = np.zeros((128, 64, 3), np.uint8)
    pixels[32:96] = picture()
    assert np.array_equal(fit(pixels, SIZE), picture())


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([(64, 64), (48, 64), (32, 96)]))
def test_every_size_is_brought_to_that_of_the_model(height, width, size):
    rgb = fit(np.full((height, width, 3), (10, 20, 30), np.uint8), size)
    assert rgb.shape == (*size, 3)
    assert (rgb == (10, 20, 30)).all()


def spoilt(**fields):
    image = message(picture(), 'rgb8')
    for name, value in fields.items():
        setattr(image, name, value)
    return image


@pytest.mark.parametrize(('image', 'kind', 'words'), [
    (spoilt(encoding='16UC1'), 'depth image', ('16UC1', 'colour camera')),
    (spoilt(encoding='32FC1'), 'depth image', ('32FC1', 'colour camera')),
    (spoilt(encoding='mono16'), 'depth image', ('mono16',)),
    (spoilt(encoding='jpeg2000'), 'wrong encoding', ('jpeg2000', 'rgb8')),
    (spoilt(encoding='8UC3'), 'wrong encoding', ('8UC3', 'bgr8')),
    (spoilt(encoding=''), 'wrong encoding', ('rgb8',)),
    (spoilt(data=array.array('B')), 'empty', ('driver',)),
    (spoilt(height=0), 'empty', ('64 x 0',)),
    (spoilt(width=0), 'empty', ('0 x 64',)),
    (spoilt(data=array.array('B', bytes(64 * 64 * 3 - 1))), 'wrong size', ('12287', '12288')),
    (spoilt(data=array.array('B', bytes(64 * 64 * 3 + 1))), 'wrong size', ('12289', '12288')),
    (spoilt(height=128), 'wrong size', ('24576',)),
    (spoilt(step=100), 'wrong size', ('step is 100', '192')),
    (spoilt(step=0), 'wrong size', ('step is 0',)),
    (message(uyvy(picture())[:, :63], 'uyvy'), 'wrong size', ('even width',)),
    (message(picture()[:63, :, 0], 'bayer_rggb8'), 'wrong size', ('even width and height',))])
def test_images_that_cannot_be_read_are_refused_with_what_is_wrong(image, kind, words):
    with pytest.raises(ImageError) as refusal:
        to_rgb(image, SIZE)
    assert refusal.value.kind == kind
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@given(st.integers(0, 70), st.integers(0, 70), st.integers(0, 300), st.integers(0, 15_000),
       st.sampled_from([*EXACT, *ALIKE, 'mono8', '16UC1', 'x']))
def test_no_combination_of_header_and_data_does_more_than_be_refused(height, width, step, length, encoding):
    image = Image(height=height, width=width, step=step, encoding=encoding,
                  data=array.array('B', bytes(length)))
    try:
        assert to_rgb(image, SIZE).shape == (64, 64, 3)
    except ImageError as error:
        assert error.kind and str(error)


def compressed(data, image_format='jpeg'):
    return CompressedImage(format=image_format, data=array.array('B', data))


def encode(extension):
    _, data = cv2.imencode(extension, cv2.cvtColor(picture(), cv2.COLOR_RGB2BGR))
    return data.tobytes()


def test_a_png_is_read_exactly_and_a_jpeg_nearly():
    png = compressed(encode('.png'), 'rgb8; png compressed bgr8')
    assert np.array_equal(compressed_to_rgb(png, SIZE), picture())
    assert np.abs(compressed_to_rgb(compressed(encode('.jpg')), SIZE).astype(int) - picture()).mean() < 4.0


def test_a_jpeg_with_padding_behind_it_is_read():
    assert compressed_to_rgb(compressed(encode('.jpg') + bytes(100)), SIZE).shape == (64, 64, 3)


@pytest.mark.parametrize(('image', 'kind'), [
    (compressed(b''), 'empty'), (compressed(b'nonsense'), 'not decodable'),
    (compressed(encode('.jpg')[:-100]), 'cut short'), (compressed(encode('.png')[:-100]), 'cut short'),
    (compressed(b'\xff\xd8 nonsense \xff\xd9'), 'not decodable'),
    (compressed(encode('.png'), '16UC1; compressedDepth png'), 'depth image'),
    (compressed(encode('.png'), '16UC1; png compressed'), 'depth image')])
def test_compressed_images_that_cannot_be_read_are_refused(image, kind):
    with pytest.raises(ImageError) as refusal:
        compressed_to_rgb(image, SIZE)
    assert refusal.value.kind == kind


def claiming(data, width, height):
    """A JPEG or PNG that says to have another size."""
    if data.startswith(b'\x89PNG'):
        header = b'IHDR' + struct.pack('>II', width, height) + data[24:29]
        return data[:12] + header + struct.pack('>I', zlib.crc32(header)) + data[33:]
    at = data.index(b'\xff\xc0') + 5
    return data[:at] + struct.pack('>HH', height, width) + data[at + 4:]


def scans(data, count):
    """A JPEG whose last scan comes so often."""
    last = data.rindex(b'\xff\xda')
    return data[:-2] + data[last:-2] * count + b'\xff\xd9'


@pytest.mark.parametrize(('data', 'word'), [
    (claiming(encode('.jpg'), 30_000, 30_000), '30000 x 30000 pixels'), (claiming(encode('.png'), 4097, 4096), '4097 x 4096'),
    (claiming(encode('.jpg'), 65_535, 257), '65535 x 257'), (scans(encode('.jpg'), 64), '65 scans')],
    ids=['jpeg', 'png', 'flat', 'scans'])
def test_a_few_bytes_that_stand_for_much_memory_or_time_are_refused_before_they_are_decoded(data, word, monkeypatch):
    monkeypatch.setattr(cv2, 'imdecode', lambda *_: pytest.fail('it was decoded'))
    with pytest.raises(ImageError, match=word) as refusal:
        compressed_to_rgb(compressed(data), SIZE)
    assert refusal.value.kind == 'too large'


@pytest.mark.parametrize('extension', ['.bmp', '.tiff', '.webp', '.jp2'])
def test_formats_that_no_camera_sends_are_not_even_tried(extension):
    with pytest.raises(ImageError, match='publish JPEG or PNG'):
        compressed_to_rgb(compressed(encode(extension)), SIZE)


@pytest.mark.parametrize('insert', [b'', b'noise', b'\xff\xff', b'\xff\x01', b'\xff\x00'])
def test_a_jpeg_whose_markers_are_not_side_by_side_is_read_as_libjpeg_reads_it(insert):
    data = encode('.jpg')
    at = data.index(b'\xff\xdb')
    assert compressed_to_rgb(compressed(data[:at] + insert + data[at:]), SIZE).shape == (64, 64, 3)


@given(st.binary(max_size=200), st.sampled_from([b'', b'\xff\xd8', b'\x89PNG\r\n\x1a\n']))
def test_no_bytes_do_more_than_be_refused(data, start):
    try:
        assert compressed_to_rgb(compressed(start + data), SIZE).shape == (64, 64, 3)
    except ImageError as error:
        assert error.kind and str(error)


def test_a_jpeg_of_our_own_is_read_again():
    from builtin_interfaces.msg import Time
    jpeg = to_jpeg(picture(), Time(sec=3, nanosec=5), 'camera')
    assert (jpeg.format, jpeg.header.stamp.sec, jpeg.header.frame_id) == ('jpeg', 3, 'camera')
    assert np.abs(compressed_to_rgb(jpeg, SIZE).astype(int) - picture()).mean() < 4.0


@pytest.fixture
def install_bridge(tmp_path, monkeypatch):
    """A function that installs the source of a cv_bridge as a distribution would, for one test."""
    def install(source):
        (tmp_path / 'cv_bridge.py').write_text(source)
        monkeypatch.setenv('ROS_DISTRO', 'jazzy')
        monkeypatch.setenv('PYTHONPATH', str(tmp_path))
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, 'cv_bridge', raising=False)
        images.converter.cache_clear()
    yield install
    sys.modules.pop('cv_bridge', None)
    images.converter.cache_clear()


def test_without_a_distribution_the_conversion_is_our_own(monkeypatch):
    monkeypatch.delenv('ROS_DISTRO', raising=False)
    images.converter.cache_clear()
    assert images.converter() is images.convert_colour
    images.converter.cache_clear()


BLIND_TO_PADDING = '''
import numpy as np
class CvBridge:
    def imgmsg_to_cv2(self, message, encoding):
        rows = np.frombuffer(message.data, np.uint8)
        pixels = rows[:message.height * message.width * 3].reshape(message.height, message.width, 3)
        return pixels if encoding == message.encoding else pixels[..., ::-1]
'''
# As Jazzy's: its encodings are those of OpenCV's conversions, and the newer names of two of them are missing.
OF_JAZZY = '''
from worldmodel_ros.inputs.images import convert_colour
class CvBridgeError(TypeError):
    pass
class CvBridge:
    used = []
    def imgmsg_to_cv2(self, message, encoding):
        if message.encoding in ('uyvy', 'yuyv') or encoding != 'rgb8':
            raise CvBridgeError(f'Unrecognized image encoding [{message.encoding}]')
        self.used.append(message.encoding)
        return convert_colour(message)
'''
CRASHING = 'import os; os.abort()'


# As the one on PyPI, and as one that was built for another numpy.
@pytest.mark.parametrize('source', [BLIND_TO_PADDING, CRASHING], ids=['blind to padding', 'crashing'])
def test_a_cv_bridge_that_does_not_work_is_not_used(install_bridge, source):
    install_bridge(source)
    assert images.converter() is images.convert_colour


def test_a_cv_bridge_is_used_for_the_encodings_that_it_knows_and_no_others(install_bridge):
    install_bridge(OF_JAZZY)
    images.converter()
    from cv_bridge import CvBridge
    CvBridge.used.clear()
    for encoding, encoded in {**EXACT, **ALIKE}.items():
        rgb = to_rgb(message(encoded(picture()), encoding, 6), SIZE)
        assert np.abs(rgb.astype(int) - picture())[4:-4, 4:-4].mean() < 4.0, encoding
    assert set(CvBridge.used) == {*EXACT, *ALIKE} - {'uyvy', 'yuyv'}


def test_whatever_a_conversion_raises_refuses_the_image(install_bridge, monkeypatch):
    install_bridge(OF_JAZZY)
    images.converter()
    from cv_bridge import CvBridge, CvBridgeError

    def fail(*_):
        raise CvBridgeError('OpenCV(4.6.0) error: (-215:Assertion failed)')
    monkeypatch.setattr(CvBridge, 'imgmsg_to_cv2', fail)
    with pytest.raises(ImageError, match='64 x 64 pixels in bgr8 cannot be converted .*Assertion failed') as refusal:
        to_rgb(message(picture(), 'bgr8'), SIZE)
    assert refusal.value.kind == 'not convertible'


@pytest.mark.skipif(importlib.util.find_spec('cv_bridge') is None, reason='no cv_bridge is installed')
def test_the_cv_bridge_that_is_installed_agrees_with_our_own_conversion():
    try:
        converter = images.cv_bridge_converter()
    except ImportError as error:
        pytest.skip(f'the cv_bridge that is installed cannot be imported: {error}')
    agreeing = images.probed(converter)
    assert {*EXACT, *ALIKE, 'mono8'} - {'uyvy', 'yuyv'} <= set(agreeing)
