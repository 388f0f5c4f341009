"""Peaks of runs on a device written in Python (PrivateUse1): the same training step in another simulation.

Independent of pipeline/prediction, which has CPU tensors stand for a GPU's; torch keeps this device's API to itself, so
it runs in a process of its own:

    python tests/private_device.py '[{"micro_batch_size": 4, "precision": "bf16"}]'
"""

import json
import sys
import types
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from conftest import tiny
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration
from transformers import masking_utils, modeling_utils

from pipeline.base.contracts import Prepared, Trainable
from pipeline.config.experiment import Experiment
from pipeline.prediction.fake_batches import RepeatedRow
from pipeline.training.profiler import record_lifetimes

NAME = "fakegpu"
TO_HALF = ("addmm", "mm", "matmul", "linear", "bmm", "baddbmm")
TO_FLOAT = ("layer_norm", "native_layer_norm", "pow.Tensor_Scalar", "nll_loss", "exp", "log", "mse_loss", "rsqrt")
CAST: dict[int, Tensor] = {}


def register_device() -> None:
    """Make the device known to torch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME)  # type: ignore[attr-defined]
    module: Any = getattr(torch, NAME, None) or types.ModuleType(NAME)
    module.is_available = module.is_initialized = lambda: True
    module.device_count, module.current_device, module._is_in_bad_fork = (lambda: 1), (lambda: 0), (lambda: False)
    module.manual_seed_all = module.set_rng_state = lambda *args, **kwargs: None
    module.get_rng_state = lambda *args: torch.zeros(1, dtype=torch.uint8)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    module.device = lambda index: nullcontext()


def register_autocast() -> list[Library]:
    """Cast what CUDA's autocast casts, weights once a forward pass."""
    outside = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def half(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if value.is_leaf and value.requires_grad:
            if id(value) not in CAST:
                CAST[id(value)] = _half(value)
            return CAST[id(value)]
        return _half(value)

    def single(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    def kernel(name: str, cast: Any) -> Any:
        base, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, base), overload or "default")

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(outside):
                return operator(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

        return run

    everything, aten = Library("_", "IMPL"), Library("aten", "IMPL")
    everything.fallback(fallthrough_kernel, dispatch_key="AutocastPrivateUse1")
    for names, cast in ((TO_HALF, half), (TO_FLOAT, single)):
        for name in names:
            aten.impl(name, kernel(name, cast), "AutocastPrivateUse1")
    return [everything, aten]


def _half(value: Tensor) -> Tensor:
    return value.to(torch.bfloat16)


def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Tensor:
    """Attend as the flash kernel does in 16 bits, as the memory-efficient one does in 32."""
    heads = (query, key, value)
    if torch.is_autocast_enabled(NAME):
        heads = tuple(_half(part) if part.dtype == torch.float32 else part for part in heads)  # type: ignore[assignment]
        result = torch.ops.aten._scaled_dot_product_flash_attention(*heads, dropout_p, True, scale=1.0)
    else:
        result = torch.ops.aten._scaled_dot_product_efficient_attention(*heads, None, True, dropout_p, True, scale=1.0)
    return result[0]  # type: ignore[no-any-return]


def peak(settings: dict[str, Any]) -> int:
    """Return the maximum of the bytes alive on the device over two optimizer steps."""
    asked = tiny(**settings)
    experiment = Experiment(asked.settings.model_copy(update={"device": f"{NAME}:0"}))
    prepared = asked.read_corpus()
    prepared = replace(prepared, train=RepeatedRow(prepared.train, torch.device("cpu")))

    def build(experiment: Experiment, prepared: Prepared) -> Trainable:
        with torch.device(f"{NAME}:0"):
            built = experiment.model.build(experiment.settings.model, prepared.vocabulary_size)

        def loss(module: Any, batch: Any, num_targets: int) -> Tensor:
            CAST.clear()
            return built.loss(module, batch, num_targets)

        return replace(built, loss=loss)

    def mark(step: int, phase: str) -> None:
        CAST.clear()

    with FakeTensorMode(allow_non_fake_inputs=True):
        return int(record_lifetimes(experiment, prepared, mark, build).allocated_bytes_E.max())


def main() -> None:
    """Print the peak of each of the settings given."""
    register_device()
    kept = register_autocast()
    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda positions: (find(positions), None)[1]
    modeling_utils.get_torch_context_manager_or_global_device = lambda: None
    F.scaled_dot_product_attention = attend  # type: ignore[assignment]
    F.dropout = lambda x, p=0.5, training=True, inplace=False: (
        torch.native_dropout(x, p, True)[0] if training and p > 0 else x
    )
    sys.stdout.write(json.dumps([peak(settings) for settings in json.loads(sys.argv[1])]))
    del kept


if __name__ == "__main__":
    main()
