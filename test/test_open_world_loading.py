"""What is loaded of an open world model, and what is refused; with a VAE that has no weights."""
import json
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import open_world
import pytest
import wan_tiny as tiny
from safetensors.torch import save_file

from worldmodel_ros.engine.loading import load_world
from worldmodel_ros.engine.open_world.world import OpenWorld
from worldmodel_ros.model.checkpoint_description import ModelError
from worldmodel_ros.model.wan.vae import WanVae
from worldmodel_ros.serving.worlds import process


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(WanVae, 'load', lambda *arguments: SimpleNamespace(rows=None))
    open_world.write_network(tmp_path)
    (tmp_path / 'text').mkdir()
    save_file({'rows': tiny.text()}, tmp_path / 'text' / 'rows.safetensors')
    describe(tmp_path)
    return tmp_path


def describe(folder, **changes):
    (folder / 'world.json').write_text(json.dumps({**open_world.WORLD, **changes}))


@pytest.mark.parametrize('name', ['threads', 'gpus', 'sessions'])
@pytest.mark.parametrize('number', [0, -1])
def test_numbers_below_one_are_refused_by_name(folder, name, number):
    with pytest.raises(ModelError, match=f'{name} must be at least 1, not {number}'):
        load_world(str(folder), **{name: number})


def test_the_server_ends_with_the_code_of_a_refused_option(folder):
    done = subprocess.run([sys.executable, '-m', 'worldmodel_ros.cli', 'serve', '--model', folder, '--threads', '0',
                           '--socket', folder / 'world.sock'], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr == 'worldmodel serve: threads must be at least 1, not 0\n'


def test_a_smaller_model_is_loaded_once_even_if_it_names_itself(folder, monkeypatch):
    loads, load = [], OpenWorld._load

    def counted(world, layers):
        loads.append(world.description.name)
        assert len(loads) < 5, loads
        return load(world, layers)
    monkeypatch.setattr(OpenWorld, '_load', counted)
    describe(folder, smaller='.')
    world = load_world(str(folder))
    assert world.smaller.smaller is None and len(loads) == 2


def test_the_server_does_not_load_the_smaller_model_that_it_never_uses(folder, tmp_path, monkeypatch):
    describe(folder, smaller='.')
    served = []

    async def serve(listening, worlds, load, model, deadline):
        served.append(load())
    monkeypatch.setattr(process, '_serve', serve)
    monkeypatch.setattr(process, 'logging', MagicMock())  # the levels of other tests stay
    assert process.serve_world(tmp_path / 'world.sock', str(folder)) == 0
    assert served[0].smaller is None and load_world(str(folder)).smaller is not None
