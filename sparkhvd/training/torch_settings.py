"""Process-wide torch settings, copied from the driver to ranks and workers of `transform`.

Only values other than torch's default are sent, so an unchanged session sends nothing. Settings that this version of
torch does not have are skipped. Settings that do not change results are not copied: threads, the mode of autograd
around `fit` (training and `transform` set their own mode), view replay, and how `Module.to` replaces parameters.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

# Values by the names in `_SETTINGS`.
TorchSettings: TypeAlias = "Mapping[str, Any]"


@dataclass(frozen=True)
class _Setting:
    """A process-wide setting of torch.

    Attributes:
        name: public name of the setting, below `torch`.
        get: returns the value; raises in versions without the setting.
        put: sets the value.
        defaults: default values of all versions and builds of torch.
    """

    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]
    defaults: tuple[object, ...]


def _function(getter: str, setter: str, *defaults: object) -> _Setting:
    get, put = operator.attrgetter(getter), operator.attrgetter(setter)
    return _Setting(setter, lambda: get(torch)(), lambda value: put(torch)(value), defaults)


def _attribute(path: str, *defaults: object) -> _Setting:
    parent, _, name = path.rpartition(".")
    get, of = operator.attrgetter(path), operator.attrgetter(parent)
    return _Setting(path, lambda: get(torch), lambda v: setattr(of(torch), name, v), defaults)


def _library(kind: str) -> _Setting:
    """Describe the choice of a library.

    A single function of torch gets it (as an enumeration) and sets it.
    """
    choose = operator.attrgetter(f"backends.cuda.preferred_{kind}_library")
    return _Setting(
        f"backends.cuda.preferred_{kind}_library",
        lambda: choose(torch)().name.lower(),
        lambda value: choose(torch)(value),
        ("default", "cublas"),
    )


def _autocast_dtype(device: str, default: torch.dtype) -> _Setting:
    return _Setting(
        f"set_autocast_dtype({device!r})",
        lambda: torch.get_autocast_dtype(device),
        lambda value: torch.set_autocast_dtype(device, value),
        (default,),
    )


def _autocast_caches() -> _Setting:
    return _Setting(
        "set_autocast_cache_enabled",
        torch.is_autocast_cache_enabled,
        torch.set_autocast_cache_enabled,
        (True,),
    )


def _checks_sparse_tensors() -> _Setting:
    def put(value: bool) -> None:
        checks = torch.sparse.check_sparse_tensor_invariants
        switch: Callable[[], object] = checks.enable if value else checks.disable
        switch()

    return _Setting(
        "sparse.check_sparse_tensor_invariants",
        lambda: torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        put,
        (False,),
    )


def _flushes_denormals() -> bool:
    """Test whether denormal numbers become 0. torch has no function to read this setting."""
    return float(torch.tensor(2e-38, dtype=torch.float32, device="cpu") * 0.5) == 0.0


# Older settings come before the settings that replace them, because an older setting also sets its replacements.
_SETTINGS = (
    _function("get_default_dtype", "set_default_dtype", torch.float32),
    _function("get_float32_matmul_precision", "set_float32_matmul_precision", "highest"),
    _function("get_deterministic_debug_mode", "set_deterministic_debug_mode", 0),
    _attribute("utils.deterministic.fill_uninitialized_memory", True),
    _Setting("set_flush_denormal", _flushes_denormals, torch.set_flush_denormal, (False,)),
    _Setting(
        "autograd.set_detect_anomaly",
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
        ((False, True),),
    ),
    _checks_sparse_tensors(),
    _autocast_caches(),
    _autocast_dtype("cpu", torch.bfloat16),
    _autocast_dtype("cuda", torch.float16),
    _attribute("backends.cudnn.enabled", True),
    _attribute("backends.cudnn.benchmark", False),
    _attribute("backends.cudnn.benchmark_limit", 10, None),
    _attribute("backends.cudnn.deterministic", False),
    _attribute("backends.cudnn.allow_tf32", True),
    _attribute("backends.cudnn.depthwise_kernel", "auto"),
    _attribute("backends.miopen.immediate", False),
    _function("cuda.tunable.is_enabled", "cuda.tunable.enable", False),
    _attribute("backends.cuda.matmul.allow_fp16_reduced_precision_reduction", True),
    _attribute("backends.cuda.matmul.allow_bf16_reduced_precision_reduction", True),
    _attribute("backends.cuda.matmul.allow_fp16_accumulation", False),
    _function("backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp", True),
    _function(
        "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp", True
    ),
    _function("backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp", True),
    _function("backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp", True),
    _function(
        "backends.cuda.fp16_bf16_reduction_math_sdp_allowed",
        "backends.cuda.allow_fp16_bf16_reduction_math_sdp",
        False,
    ),
    # Order of attention kernels; torch before 2.7 has fewer kernels.
    _function(
        "_C._get_sdp_priority_order", "_C._set_sdp_priority_order", [1, 2, 0, 3, 4], [1, 2, 0, 3]
    ),
    _library("linalg"),
    _library("blas"),
    _library("rocm_fa"),
    _function("_C._get_nnpack_enabled", "backends.nnpack.set_flags", True),
    _attribute("backends.mkldnn.enabled", True),
    _attribute("backends.mkldnn.deterministic", False),
    _attribute("backends.mkldnn.allow_tf32", False, None),
    _function("backends.mha.get_fastpath_enabled", "backends.mha.set_fastpath_enabled", True),
    _attribute("backends.opt_einsum.strategy", "auto", None),
    _attribute("backends.quantized.engine", "x86", "qnnpack", "none"),
    _attribute("backends.fp32_precision", "none"),
    _attribute("backends.cuda.matmul.fp32_precision", "none"),
    _attribute("backends.cudnn.fp32_precision", "none"),
    _attribute("backends.cudnn.conv.fp32_precision", "tf32", "none"),
    _attribute("backends.cudnn.rnn.fp32_precision", "tf32", "none"),
    _attribute("backends.mkldnn.fp32_precision", "none"),
    _attribute("backends.mkldnn.matmul.fp32_precision", "none"),
    _attribute("backends.mkldnn.conv.fp32_precision", "none"),
    _attribute("backends.mkldnn.rnn.fp32_precision", "none"),
)
_HOOKS = ("forward_pre", "forward", "backward_pre", "backward")
_BY_NAME = {setting.name: setting for setting in _SETTINGS}
_UNKNOWN = object()


def settings_here() -> dict[str, Any]:
    """Collect this process's settings other than torch's defaults.

    Warn about settings that cannot be copied.
    """
    for text in _only_here():
        warnings.warn(text, stacklevel=2)
    values = {setting.name: _value(setting) for setting in _SETTINGS}
    return {
        name: value
        for name, value in values.items()
        if value is not _UNKNOWN and value not in _BY_NAME[name].defaults
    }


def _value(setting: _Setting) -> Any:
    # Some versions do not have the setting, or refuse to read an older setting after its replacement was set.
    try:
        return setting.get()
    except (AttributeError, RuntimeError):
        return _UNKNOWN


def _only_here() -> Iterator[str]:
    """Yield a warning for each setting limited to this process or thread."""
    device = torch.get_default_device()
    if device.type != "cpu":
        yield (
            f"torch.set_default_device({str(device)!r}) applies to this process only. Ranks and workers of transform create tensors on the "
            "CPU unless the model gives a device, and choose their own device by use_gpu. In forward give device=x.device."
        )
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if kinds:
        yield (
            f"torch.autocast({kinds[0]!r}) applies to this thread only, not to ranks and workers of transform. Give "
            "precision='bf16-mixed' or '16-mixed'."
        )
    of_all = vars(torch.nn.modules.module)
    if any(of_all.get(f"_global_{kind}_hooks") for kind in _HOOKS):
        yield (
            "Global module hooks (torch.nn.modules.module.register_module_...) run in this process only, not in ranks and workers of "
            "transform. Register hooks on the model itself, which are sent with it."
        )


@contextlib.contextmanager
def as_on_driver(settings: TorchSettings) -> Iterator[None]:
    """Apply the driver's settings in the block, then restore the previous values.

    Warns about a setting that cannot be applied in this process.
    """
    before = {name: _value(_BY_NAME[name]) for name in settings if name in _BY_NAME}
    for name, value in settings.items():
        _put(name, value, before.get(name, _UNKNOWN))
    try:
        yield
    finally:
        # Restore in the same order, because an older setting also sets newer settings, which are then restored after
        # it.
        for name, value in before.items():
            # If the previous value equals the driver's, do not restore it: another thread may have set it, and will
            # restore.
            if value is not _UNKNOWN and value != settings[name]:
                _quietly(_BY_NAME[name], value)


def _put(name: str, value: object, before: object) -> None:
    if value == before:
        return
    try:
        setting = _BY_NAME[name]
        if _value(setting) != value:  # an older setting may have set it already
            _quietly(setting, value)
    except Exception as e:  # noqa: BLE001 - any error of another version or build
        warnings.warn(
            f"The driver has set torch.{name} to {value!r}, but this process cannot set it: {type(e).__name__}: {e}. Results may differ.",
            stacklevel=2,
        )


def _quietly(setting: _Setting, value: object) -> None:
    """Set a value without torch's deprecation warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        setting.put(value)


class _HasSettings(Protocol):
    @property
    def torch_settings(self) -> TorchSettings: ...


Spec = TypeVar("Spec", bound=_HasSettings)
Result = TypeVar("Result")


def held(function: Callable[[Spec], Result]) -> Callable[[Spec], Result]:
    """Decorate a function of a spec to run with the driver's torch settings."""

    @functools.wraps(function)
    def run(spec: Spec) -> Result:
        with as_on_driver(spec.torch_settings):
            return function(spec)

    return run
