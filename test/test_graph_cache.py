"""The graphs that are exported once a machine: taken as they were written, or made again."""
import logging

import pytest
from small_model import small_checkpoint

from worldmodel_ros.engine.backends import onnx as onnx_backend


@pytest.fixture
def exporting(tmp_path, monkeypatch):
    """Returns a checkpoint's graphs, and counts how often they are exported."""
    monkeypatch.setenv('WORLDMODEL_CACHE', str(tmp_path / 'cache'))
    folder, exports = small_checkpoint(tmp_path / 'model'), []

    def export(target):
        exports.append(target)
        for name in onnx_backend.GRAPHS:
            (target / f'{name}.onnx').write_bytes(name.encode() * 100)

    return lambda quantised=True, version=1: onnx_backend.exported(
        folder, quantised, version, onnx_backend.GRAPHS, export), exports


def test_graphs_are_exported_once(exporting):
    graphs, exports = exporting
    assert graphs() == graphs() and len(exports) == 1


def test_graphs_of_another_precision_or_version_are_others(exporting):
    graphs, exports = exporting
    assert len({graphs(), graphs(quantised=False), graphs(version=2)}) == len(exports) == 3


@pytest.mark.parametrize('damage', [
    lambda file: file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]),
    lambda file: file.write_bytes(file.read_bytes()[:-1]),
    lambda file: file.unlink(),
    lambda file: (file.parent / 'checksums.json').unlink(),
    lambda file: (file.parent / 'checksums.json').write_text('{}')])
def test_graphs_that_are_not_as_they_were_written_are_exported_again(exporting, damage, caplog):
    graphs, exports = exporting
    folder = graphs()
    damage(folder / 'block.onnx')
    with caplog.at_level(logging.WARNING):
        assert graphs() == folder
    assert len(exports) == 2 and 'is damaged: the graphs are exported again' in caplog.text
    assert (folder / 'block.onnx').read_bytes() == b'block' * 100
    assert graphs() == folder and len(exports) == 2
    assert not [other for other in folder.parent.iterdir() if other != folder], 'something is left behind'
