"""torch settings that change results: ranks and workers get the driver's, and no other process does."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sparkhvd.data.columns import labels
from sparkhvd.data.store.store import Store
from sparkhvd.training import torch_settings
from sparkhvd.training.torch_settings import as_on_driver, settings_here
from tests.training.ranks import Case
from tests.transform.test_worker import transformed

pytestmark = pytest.mark.pure

# One of each kind. GPU settings are flags on any machine.
CHANGES: dict[str, tuple[Callable[[], object], object]] = {
    "set_default_dtype": (lambda: torch.set_default_dtype(torch.float64), torch.float64),
    "set_float32_matmul_precision": (
        lambda: torch.set_float32_matmul_precision("high"),
        "high",
    ),
    "set_deterministic_debug_mode": (
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        1,
    ),
    "set_flush_denormal": (lambda: torch.set_flush_denormal(True), True),
    "autograd.set_detect_anomaly": (
        lambda: torch.autograd.set_detect_anomaly(True, False),
        (True, False),
    ),
    "set_autocast_dtype('cpu')": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        torch.float16,
    ),
    "backends.cudnn.benchmark": (lambda: setattr(torch.backends.cudnn, "benchmark", True), True),
    "backends.cudnn.allow_tf32": (
        lambda: setattr(torch.backends.cudnn, "allow_tf32", False),
        False,
    ),
    "backends.cuda.enable_flash_sdp": (lambda: torch.backends.cuda.enable_flash_sdp(False), False),
    "backends.cudnn.fp32_precision": (
        lambda: setattr(torch.backends.cudnn, "fp32_precision", "ieee"),
        "ieee",
    ),
    "backends.miopen.immediate": (lambda: setattr(torch.backends.miopen, "immediate", True), True),
    "backends.nnpack.set_flags": (lambda: torch.backends.nnpack.set_flags(False), False),
    "set_autocast_cache_enabled": (lambda: torch.set_autocast_cache_enabled(False), False),
    "sparse.check_sparse_tensor_invariants": (
        torch.sparse.check_sparse_tensor_invariants.enable,
        True,
    ),
    "_C._set_sdp_priority_order": (
        lambda: torch._C._set_sdp_priority_order([2, 1, 0, 3, 4]),
        [2, 1, 0, 3, 4],
    ),
    "backends.cuda.preferred_rocm_fa_library": (
        lambda: torch.backends.cuda.preferred_rocm_fa_library("ck"),
        "ck",
    ),
    "backends.mkldnn.enabled": (lambda: setattr(torch.backends.mkldnn, "enabled", False), False),
    "backends.mha.set_fastpath_enabled": (
        lambda: torch.backends.mha.set_fastpath_enabled(False),
        False,
    ),
}


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """Begin and end with torch's defaults."""
    assert settings_here() == {}
    yield
    undo()
    assert settings_here() == {}


def undo() -> None:
    for setting in torch_settings._SETTINGS:
        if setting.name in settings_here():
            setting.put(setting.defaults[0])


@pytest.mark.parametrize("name", CHANGES)
def test_torch_setting_is_applied_for_the_work_and_restored(name: str) -> None:
    change, expected = CHANGES[name]
    setting = torch_settings._BY_NAME[name]
    if torch_settings._value(setting) is torch_settings._UNKNOWN:
        pytest.skip(f"torch {torch.__version__} has no {name}")
    change()
    carried = pickle.loads(pickle.dumps(settings_here()))
    assert carried[name] == expected
    undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with as_on_driver(carried):
            assert settings_here() == carried
            with as_on_driver(carried):  # as another thread, which ends later or earlier
                pass
            assert settings_here() == carried
        assert settings_here() == {}


def test_newer_forms_of_torch_settings_are_transferred() -> None:
    """torch refuses to return the older form of a setting after the newer form was set."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        torch.set_float32_matmul_precision("high")  # the setting of older versions
    else:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    carried = settings_here()
    assert carried
    undo()
    with as_on_driver(carried):
        assert settings_here() == carried


def test_torch_settings_that_cannot_be_applied_cause_a_warning() -> None:
    with (
        pytest.warns(
            UserWarning, match=r"torch\.backends\.of_later to True, but this process cannot set it"
        ),
        as_on_driver({"backends.of_later": True}),
    ):
        pass
    with torch.autocast("cpu"), pytest.warns(UserWarning, match=r"Give precision='bf16-mixed'"):
        settings_here()
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output)
    with pytest.warns(UserWarning, match="Global module hooks .* in this process only"):
        settings_here()
    hook.remove()
    torch.set_default_device("meta")
    try:
        with pytest.warns(
            UserWarning, match=r"set_default_device\('meta'\) applies to this process"
        ):
            settings_here()
    finally:
        torch.set_default_device(None)


class Made(nn.Module):
    """Makes tensors of the default dtype, and says what it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("bits", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        assert torch.are_deterministic_algorithms_enabled()
        made = torch.ones(1)
        self.bits.fill_(8 * made.element_size())
        return self.layer(x) + made.float() + self.bits


SETTINGS = {"set_default_dtype": torch.float64, "set_deterministic_debug_mode": 2}


def test_ranks_train_with_the_settings_of_the_driver(tmp_path: Path) -> None:
    model = Made()
    case = Case(
        Store.create(tmp_path),
        model,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        loss=nn.MSELoss(),
        metrics=["mae"],
        options={"torch_settings": SETTINGS, "validation": 0.2, "has_validation": True},
    )
    case.train(2)
    weights = case.weights(1)
    assert int(weights["bits"]) == 64
    assert weights["layer.weight"].dtype == torch.float32


def test_workers_of_transform_have_the_settings_of_the_driver() -> None:
    class Plus(Made):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :3])

    rows = torch.randn(5, 4)
    module = Plus()
    found = transformed(module, rows, labels.IDENTITY, torch_settings=SETTINGS)
    assert torch.allclose(found.float(), module.layer(rows[:, :3]) + 65)
    assert torch.get_default_dtype() == torch.float32  # of the next task in the same process
    with pytest.raises(AssertionError):
        transformed(module, rows, labels.IDENTITY)
