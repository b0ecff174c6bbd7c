"""The stand-in of ``mmcv._ext``, checked in fresh interpreters where the import order matters."""

import importlib.machinery
import importlib.util
import inspect
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from mmzero.integrations.mmcv import MissingOpError, install_stand_in, stand_in

_EXT_NAME = 'mmcv._ext'
_REPO_ROOT = Path(__file__).resolve().parents[3]


def _mmcv_lite_installed() -> bool:
    spec = importlib.util.find_spec('mmcv')
    if spec is None:
        return False
    folders = spec.submodule_search_locations
    return importlib.machinery.PathFinder.find_spec(_EXT_NAME, folders) is None


needs_mmcv_lite = pytest.mark.skipif(not _mmcv_lite_installed(), reason='needs mmcv without its compiled module')


@pytest.fixture
def no_ext(monkeypatch):
    """An interpreter in which nobody has asked for ``mmcv._ext``; restored afterwards."""
    monkeypatch.delitem(sys.modules, _EXT_NAME, raising=False)
    yield
    sys.modules.pop(_EXT_NAME, None)


@pytest.fixture
def ext(no_ext):
    assert install_stand_in() is True
    return sys.modules[_EXT_NAME]


@pytest.fixture
def mmcv_ops():
    """``mmcv.ops`` on the stand-in.

    Whatever imported ``mmcv.ops`` first gave it a stand-in; the tests must not replace that one.
    """
    assert install_stand_in() is True
    import mmcv.ops

    return mmcv.ops


def _run_python(*args, cwd=None):
    env = {**os.environ, 'PYTHONPATH': str(_REPO_ROOT)}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, cwd=cwd, timeout=300)


def _run_code(code, load_stand_in=True):
    """Run code in a fresh interpreter.

    ``stand_in`` is loaded from its file, so that nothing depends on what else ``import mmzero``
    does; it has only absolute imports.
    """
    load = f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location('stand_in', {str(stand_in.__file__)!r})
        stand_in = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(stand_in)
    """
    source = textwrap.dedent(load if load_stand_in else '') + textwrap.dedent(code)
    return _run_python('-c', source)


# --- when it is installed


@needs_mmcv_lite
def test_install_is_idempotent(no_ext):
    assert install_stand_in() is True
    first = sys.modules[_EXT_NAME]
    assert install_stand_in() is True
    assert sys.modules[_EXT_NAME] is first


def test_nothing_happens_without_mmcv(no_ext, monkeypatch):
    monkeypatch.setattr(stand_in.importlib.util, 'find_spec', lambda name, package=None: None)
    assert install_stand_in() is False
    assert _EXT_NAME not in sys.modules


@pytest.mark.parametrize('compiled', [True, False])
def test_a_compiled_module_on_disk_is_left_alone(no_ext, monkeypatch, tmp_path, compiled):
    (tmp_path / 'mmcv').mkdir()
    (tmp_path / 'mmcv' / '__init__.py').touch()
    if compiled:
        suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
        (tmp_path / 'mmcv' / f'_ext{suffix}').touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split('.')[0] == 'mmcv']:
        monkeypatch.delitem(sys.modules, name)
    assert install_stand_in() is not compiled
    assert (_EXT_NAME in sys.modules) is not compiled


def test_a_compiled_module_already_imported_is_left_alone(no_ext, monkeypatch):
    real = type(sys)(_EXT_NAME)
    monkeypatch.setitem(sys.modules, _EXT_NAME, real)
    assert install_stand_in() is False
    assert sys.modules[_EXT_NAME] is real


@needs_mmcv_lite
def test_installing_imports_neither_torch_nor_mmcv():
    result = _run_code("""
        import sys
        assert stand_in.install_stand_in()
        assert 'mmcv._ext' in sys.modules
        heavy = {'torch', 'mmcv', 'mmengine', 'numpy'} & set(sys.modules)
        assert not heavy, heavy
    """)
    assert result.returncode == 0, result.stderr


@needs_mmcv_lite
@pytest.mark.slow
def test_mmdet_models_do_not_import_without_the_stand_in():
    """Says when the stand-in has become needless."""
    result = _run_code('import mmdet.models', load_stand_in=False)
    assert result.returncode != 0
    assert f"No module named '{_EXT_NAME}'" in result.stderr


@needs_mmcv_lite
def test_mmdet_models_import_with_the_stand_in():
    result = _run_code("""
        stand_in.install_stand_in()
        import mmdet.models
        print(mmdet.models.DINO.__name__)
    """)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == 'DINO'


# --- what its attributes do


@needs_mmcv_lite
def test_an_op_names_itself_and_the_package_to_install(ext):
    from importlib import metadata

    version = metadata.version('mmcv-lite')
    with pytest.raises(MissingOpError, match="'nms'") as error:
        ext.nms(1, offset=0)
    assert f'pip uninstall mmcv-lite; pip install mmcv=={version}' in str(error.value)
    assert 'compiled module mmcv._ext' in str(error.value)
    assert isinstance(error.value, NotImplementedError)


@needs_mmcv_lite
def test_an_op_of_an_unknown_version_names_a_range(ext, monkeypatch):
    monkeypatch.setattr(stand_in, '_lite_version', lambda: None)
    with pytest.raises(MissingOpError, match=r"pip install 'mmcv>=2\.0,<2\.2'"):
        ext.nms()


@needs_mmcv_lite
def test_an_op_reached_through_mmcv_raises(mmcv_ops):
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
    with pytest.raises(MissingOpError, match="'nms'"):
        mmcv_ops.nms(boxes, torch.ones(1), 0.5)


@needs_mmcv_lite
def test_probing_for_special_names_finds_a_module_without_ops(ext):
    for name in ('__file__', '__path__', '__wrapped__', '__reduce_cython__', '_private'):
        with pytest.raises(AttributeError, match=name):
            getattr(ext, name)
    assert inspect.ismodule(ext)
    assert inspect.unwrap(ext.roi_align_forward) is ext.roi_align_forward
    with pytest.raises(TypeError, match='cannot pickle'):
        pickle.dumps(ext)
    namespace = {}
    exec(f'from {_EXT_NAME} import *', namespace)
    assert 'roi_align_forward' in namespace and 'nms' not in namespace


@needs_mmcv_lite
def test_ops_can_be_pickled(ext):
    assert pickle.loads(pickle.dumps(ext.nms)) is ext.nms


def test_the_error_can_be_built_anew_from_its_text():
    error = MissingOpError('text')
    assert str(pickle.loads(pickle.dumps(error))) == 'text'


@needs_mmcv_lite
def test_find_spec_answers_with_the_stand_in(ext):
    assert importlib.util.find_spec(_EXT_NAME) is ext.__spec__
    assert ext.__spec__.loader is not None


@needs_mmcv_lite
def test_mmengine_finds_dcn_layers(mmcv_ops):
    """`dcn_offset_lr_mult` acts only if MMEngine believes that mmcv.ops is there."""
    from mmengine.optim import build_optim_wrapper

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = mmcv_ops.ModulatedDeformConv2dPack(1, 1, 1)

    wrapper = build_optim_wrapper(
        Model(),
        dict(
            optimizer=dict(type='SGD', lr=1.0),
            paramwise_cfg=dict(dcn_offset_lr_mult=0.1),
        ),
    )
    rates = {id(p): group['lr'] for group in wrapper.param_groups for p in group['params']}
    assert sorted(rates.values()) == [0.1, 0.1, 1.0, 1.0, 1.0]


@needs_mmcv_lite
def test_mmcv_reports_its_environment(mmcv_ops):
    from mmcv.utils import collect_env

    assert collect_env()['MMCV Compiler'] == 'n/a'


# --- deformable attention, through the function that mmcv calls on CUDA

_SHAPES = [(5, 4), (3, 2)]


def _attention_inputs(dtype=torch.float64):
    batch, queries, heads, channels, points = 2, 7, 3, 4, 2
    keys = sum(height * width for height, width in _SHAPES)
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(batch, keys, heads, channels, generator=generator, dtype=dtype)
    # Some of the locations lie outside of the image.
    sampling = (batch, queries, heads, len(_SHAPES), points)
    locations = torch.rand(*sampling, 2, generator=generator, dtype=dtype) * 1.4 - 0.2
    weights = torch.rand(sampling, generator=generator, dtype=dtype)
    return [tensor.requires_grad_() for tensor in (value, locations, weights)]


def _apply(mmcv_ops, value, locations, weights):
    shapes = torch.tensor(_SHAPES)
    starts = torch.tensor([0, _SHAPES[0][0] * _SHAPES[0][1]])
    function = mmcv_ops.multi_scale_deform_attn.MultiScaleDeformableAttnFunction
    return function.apply(value, shapes, starts, locations, weights, 64)


@needs_mmcv_lite
@pytest.mark.parametrize('dtype', [torch.float32, torch.float64])
def test_deformable_attention_equals_the_pytorch_function(mmcv_ops, dtype):
    inputs, reference_inputs = _attention_inputs(dtype), _attention_inputs(dtype)
    output = _apply(mmcv_ops, *inputs)
    value, locations, weights = reference_inputs
    reference = mmcv_ops.multi_scale_deform_attn.multi_scale_deformable_attn_pytorch(
        value, torch.tensor(_SHAPES), locations, weights
    )
    assert torch.equal(output, reference)

    grad_output = torch.randn(output.shape, dtype=dtype)
    output.backward(grad_output)
    reference.backward(grad_output)
    for tensor, expected in zip(inputs, reference_inputs, strict=True):
        assert expected.grad.abs().max() > 0
        assert torch.equal(tensor.grad, expected.grad)


@needs_mmcv_lite
def test_deformable_attention_gradients_are_those_of_finite_differences(mmcv_ops):
    assert torch.autograd.gradcheck(lambda *inputs: _apply(mmcv_ops, *inputs), _attention_inputs(), fast_mode=True)


@needs_mmcv_lite
def test_deformable_attention_keeps_its_dtype_under_autocast(mmcv_ops):
    value, locations, weights = _attention_inputs(torch.bfloat16)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output = _apply(mmcv_ops, value, locations, weights)
        output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert value.grad.dtype == torch.bfloat16
    assert torch.isfinite(value.grad).all()


@needs_mmcv_lite
def test_deformable_attention_says_once_that_it_is_slow(mmcv_ops):
    from mmengine.logging import MMLogger

    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = MMLogger.get_current_instance()
    logger.addHandler(handler)
    stand_in._warn_slow_attention.cache_clear()
    try:
        for _ in range(2):
            _apply(mmcv_ops, *_attention_inputs())
    finally:
        logger.removeHandler(handler)
    messages = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    assert len(messages) == 1
    assert 'slower and uses more memory' in messages[0]


# --- python -m mmzero.integrations.mmcv


def _run_module(*args, cwd=None):
    return _run_python('-m', 'mmzero.integrations.mmcv', *args, cwd=cwd)


@needs_mmcv_lite
def test_runner_passes_arguments_neighbours_and_exit_code(tmp_path):
    (tmp_path / 'neighbour.py').write_text('NAME = "neighbour"\n')
    script = tmp_path / 'script.py'
    script.write_text(
        textwrap.dedent("""
            import sys

            import mmcv.ops
            import neighbour

            assert __name__ == '__main__'
            print(neighbour.NAME, *sys.argv, sep='|')
            sys.exit(7)
        """)
    )
    result = _run_module(str(script), '--flag', 'a b')
    assert result.returncode == 7, result.stderr
    assert result.stdout.strip() == f'neighbour|{script}|--flag|a b'


@pytest.mark.parametrize('args, message', [([], 'usage: '), (['no_such_script.py'], 'no_such_script.py')])
def test_runner_without_a_script_fails_in_one_line(args, message):
    result = _run_module(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert 'Traceback' not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
