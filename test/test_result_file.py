"""Benchmarks write their results in one form: with the command, the machine and the versions."""
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'benchmarks'))

import result_file


def test_a_result_names_its_command_machine_and_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', [str(result_file.ROOT / 'benchmarks' / 'engines.py'), '--json', 'x.json'])
    result = {**result_file.provenance(('numpy',)), 'rows': [1]}
    assert list(result) == ['command', 'machine', 'versions', 'rows'] and list(result['versions']) == ['numpy']
    assert result['command'] == 'python benchmarks/engines.py --json x.json'
    result_file.write_result(result, tmp_path / 'new' / 'x.json')
    assert capsys.readouterr().out == '' and json.loads((tmp_path / 'new' / 'x.json').read_text()) == result
    result_file.write_result(result, None, show=True)
    assert json.loads(capsys.readouterr().out) == result


@pytest.mark.parametrize('gpus, name', [(['NVIDIA H200'], 'h200'), (['NVIDIA H100 80GB HBM3'] * 2, 'h100'), ([], 'cpu'),
                                        (['NVIDIA GeForce RTX 4090'], '4090'), (['A GPU'], 'gpu')])
def test_files_are_named_after_the_gpu(gpus, name):
    assert result_file.short_name(gpus) == name
