"""One protocol declares all that a back end's users call, and every back end has all of it."""
import ast
import inspect
from pathlib import Path

import pytest
from fake_engine import FakeBackend, FakeClock, FakeEngine
from timed_backend import TimedBackend

from worldmodel_ros.engine.backends.onnx import OnnxBackend
from worldmodel_ros.engine.backends.protocol import Backend, HostMark
from worldmodel_ros.engine.backends.torch import TorchBackend
from worldmodel_ros.engine.distributed.backend import DividedBackend
from worldmodel_ros.engine.distributed.leader import LeadingBackend
from worldmodel_ros.engine.faults import FaultyBackend, Faults

ROOT = Path(__file__).resolve().parents[1]
CALLERS = ('worldmodel_ros', 'benchmarks')
NAMES = ('backend', '_backend')
# Files that hold a back end of one class, and may use what that class alone has.
OF_ONE_CLASS = {'worldmodel_ros/engine/distributed/worker.py': DividedBackend, 'benchmarks/parallel.py': LeadingBackend,
                'benchmarks/tick.py': TorchBackend, 'benchmarks/tick_measure.py': TorchBackend,
                'benchmarks/tile_model.py': TorchBackend, 'benchmarks/rank_loss.py': LeadingBackend}
NOT_A_BACK_END = ('startswith',)  # of a back end's name
BACKENDS = (OnnxBackend, TorchBackend, DividedBackend, LeadingBackend, TimedBackend, FakeBackend)


def declared():
    """Names that the protocol declares, methods and values."""
    methods = {name for name, value in vars(Backend).items() if inspect.isfunction(value)}
    return {name for name in methods | set(Backend.__annotations__) if not name.startswith('_')}


def uses(file):
    """Yield (attribute, line) of what a file reads from what it calls a back end."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, 'attr', '')
            if owner in NAMES:
                yield node.attr, node.lineno


def own(kind):
    """Names of a class without those of the protocol, and of what its methods give to self."""
    found = set()
    for each in kind.__mro__[:kind.__mro__.index(Backend)]:
        found |= set(vars(each)) | set(vars(each).get('__annotations__', {}))
        found |= {node.attr for node in ast.walk(ast.parse(inspect.getsource(each)))
                  if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'self'}
    return found


def test_what_is_called_on_a_back_end_is_declared():
    called, missing = set(), []
    for folder in CALLERS:
        for file in sorted((ROOT / folder).rglob('*.py')):
            name = str(file.relative_to(ROOT))
            known = declared() | set(NOT_A_BACK_END) | (own(OF_ONE_CLASS[name]) if name in OF_ONE_CLASS else set())
            for attribute, line in uses(file):
                called.add(attribute)
                if attribute not in known:
                    missing.append(f'{name}:{line} .{attribute}')
    assert not missing, missing
    assert declared() <= called | {'sizes'}, f'declared, and called nowhere: {sorted(declared() - called)}'


def test_a_use_that_is_not_declared_is_found(tmp_path):
    (tmp_path / 'caller.py').write_text('def f(self, backend):\n    self._backend.hidden()\n    return backend.other + x.run\n')
    assert [attribute for attribute, _ in uses(tmp_path / 'caller.py')] == ['hidden', 'other']


@pytest.mark.parametrize('kind', BACKENDS, ids=lambda kind: kind.__name__)
def test_every_back_end_has_all_of_the_protocol(kind):
    assert Backend in kind.__mro__ and not kind.__abstractmethods__
    without_default = {name for name in Backend.__annotations__ if not hasattr(Backend, name)} | Backend.__abstractmethods__
    assert without_default == {'name', 'preset', 'storage', 'run', 'host', 'stack'}
    assert without_default <= own(kind), f'{kind.__name__} lacks {sorted(without_default - own(kind))}'
    for name, method in vars(Backend).items():
        if not name.startswith('_') and inspect.isfunction(method) and not isinstance(getattr(kind, name), property):
            takes = [each.kind for each in inspect.signature(getattr(kind, name)).parameters.values()]
            assert takes == [each.kind for each in inspect.signature(method).parameters.values()], name


@pytest.mark.parametrize('backend', [TimedBackend(FakeClock()), FakeBackend(FakeEngine()),
                                     FaultyBackend(TimedBackend(FakeClock()), Faults())], ids=lambda each: type(each).__name__)
def test_an_instance_has_all_of_the_protocol(backend):
    assert [name for name in sorted(declared()) if not hasattr(backend, name)] == []
    with backend.urgent(), backend.starting_up():
        backend.require_complete()
    backend.settle_background()
    backend.before_writing()
    assert backend.fetch('what was on the host').result() == 'what was on the host'
    first = backend.mark()
    assert isinstance(first, HostMark) and first.elapsed_time(backend.mark()) >= 0.0
    with pytest.raises(NotImplementedError, match='no background work'):
        backend.in_background()
    backend.close()


def test_a_class_that_runs_nothing_is_no_back_end():
    class Nothing(Backend):
        pass
    with pytest.raises(TypeError, match='abstract'):
        Nothing()
