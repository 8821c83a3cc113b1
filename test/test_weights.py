"""Weights by name: what a process reads or draws of a tensor is its part of the whole, and nothing is made twice."""
import errno
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from small_model import SMALL, small_checkpoint, small_model

from worldmodel_ros.model import checkpoint
from worldmodel_ros.model.checkpoint_description import ModelError, checksum
from worldmodel_ros.model.weights import Part, RandomWeights, build

HALF_OF_HEADS = Part(0, tuple((part * SMALL.width, part * SMALL.width + SMALL.width // 2) for part in range(3)))


def half(name):
    """The first half of the heads and of the hidden units."""
    if name.startswith('dit.blocks.'):
        if '.qkv.' in name:
            return HALF_OF_HEADS
        if '.mlp.2.weight' in name:
            return Part(1, ((0, 2 * SMALL.width),))
    return None


@pytest.mark.parametrize('make', [
    lambda folder, part: checkpoint.load(folder, part=part),
    lambda folder, part: build(SMALL, RandomWeights(3), part=part)], ids=['stored', 'random'])
def test_a_part_is_the_part_of_the_whole_and_all_else_is_the_same(tmp_path, make):
    folder = small_checkpoint(tmp_path)
    whole, part = make(folder, lambda name: None).state_dict(), make(folder, half).state_dict()
    assert whole.keys() == part.keys()
    for name, tensor in whole.items():
        of = half(name)
        assert torch.equal(part[name], tensor if of is None else of.of(tensor)), name
    qkv = part['dit.blocks.0.qkv.weight']
    assert qkv.shape == (3 * SMALL.width // 2, SMALL.width)
    keys = whole['dit.blocks.0.qkv.weight'].chunk(3)[1]
    assert torch.equal(qkv.chunk(3)[1], keys[:SMALL.width // 2])


def test_random_weights_belong_to_the_seed_and_leave_no_layer_without_effect():
    one, same, other = (build(SMALL, RandomWeights(seed)).state_dict() for seed in (0, 0, 1))
    for name, tensor in build(SMALL, RandomWeights(0)).named_parameters():
        assert torch.equal(one[name], same[name]) and tensor.any(), name
        assert tensor.ndim < 2 or not torch.equal(one[name], other[name]), name
    latents = torch.randn(1, *SMALL.latent_size, SMALL.latent_channels)
    assert build(SMALL, RandomWeights(0)).vae.decode(latents)[0].isfinite().all()


def test_only_the_layers_take_the_type_that_is_asked_for(tmp_path):
    model = checkpoint.load(small_checkpoint(tmp_path), layers=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is (torch.bfloat16 if name.startswith('dit.blocks.') else torch.float32), name
    for name, tensor in small_model().state_dict().items():
        np.testing.assert_allclose(model.state_dict()[name].float(), tensor, rtol=4e-3, atol=0, err_msg=name)


@pytest.mark.parametrize('change, message', [
    (lambda w: w.pop('dit.embed.weight'), 'lack dit.embed.weight'),
    (lambda w: w.update({'dit.embed.weight': torch.zeros(2, 2)}), r'dit.embed.weight is \(2, 2\)'),
    (lambda w: w.update(stranger=torch.zeros(1)), 'they have stranger besides')])
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, change, message):
    from safetensors.torch import load_file, save_file
    folder = small_checkpoint(tmp_path)
    file, = folder.glob('*.safetensors')
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    describe_again(folder)
    with pytest.raises(ModelError, match=message):
        checkpoint.load(folder)


@pytest.mark.parametrize('damage, message', [
    (lambda file: file.write_bytes(flipped(file.read_bytes())), 'is damaged: its checksum'),
    (lambda file: file.unlink(), 'is missing'),
    (lambda file: file.rename(file.with_name('moved')) and file.symlink_to('nowhere'), 'cannot be read .*; restore it'),
    (lambda file: file.unlink() or file.mkdir(), 'cannot be read .*; restore it')])
def test_weights_that_are_not_as_they_were_written_are_refused_by_name(tmp_path, damage, message):
    folder = small_checkpoint(tmp_path)
    file, = folder.glob('*.safetensors')
    damage(file)
    with pytest.raises(ModelError, match=f'{file.name} {message}'):
        checkpoint.load(folder)


def test_a_description_that_may_not_be_read_is_refused_by_name(tmp_path, monkeypatch):
    folder = small_checkpoint(tmp_path)

    def forbidden(file):
        raise PermissionError(errno.EACCES, 'Permission denied', str(file))
    monkeypatch.setattr(Path, 'read_text', forbidden)
    with pytest.raises(ModelError, match='model.json does not describe a model: .*Permission denied'):
        checkpoint.load(folder)


def test_a_checkpoint_from_before_there_were_checksums_still_loads(tmp_path):
    folder = small_checkpoint(tmp_path)
    content = json.loads((folder / 'model.json').read_text())
    del content['crc32']
    (folder / 'model.json').write_text(json.dumps(content))
    assert checkpoint.load(folder).preset == SMALL


def flipped(data):
    """One bit in the middle is another: no reader of safetensors notices."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 64]) + data[middle + 1:]


def describe_again(folder):
    content = json.loads((folder / 'model.json').read_text())
    content['crc32'] = {file.name: checksum(file) for file in folder.glob('*.safetensors')}
    (folder / 'model.json').write_text(json.dumps(content))
