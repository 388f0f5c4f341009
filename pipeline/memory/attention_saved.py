"""Recomputation of a layer in which attention's result is kept: the contexts for torch.utils.checkpoint.

They do what torch.utils.checkpoint.create_selective_checkpoint_contexts does for a list of operators. That function
skips a kept operator without advancing the random generator, and on CUDA, where attention draws its dropout itself, the
dropout after it would be recomputed with another mask. It also takes no operator by its place: where attention is
computed eagerly, one of several matrix products is its result.
"""

import re
from collections import deque
from functools import cache
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

KERNELS = re.compile(
    r"aten\._scaled_dot_product_\w*attention\w*|aten\._(flash|efficient)_attention_forward"
    r"|flash_attn\w*\._flash_attn\w*forward"
)
"""Operators that compute attention in one kernel, by namespace and name: torch's own and the package flash_attn's."""
SOFTMAX = ("aten._softmax", "aten._safe_softmax")
PRODUCT = "aten.bmm"


class _Kept(NamedTuple):
    """The result of an operator, and the state of the random generator after it."""

    result: Any
    versions: list[int]
    random_state: Tensor | None


class _KeptAttention(TorchDispatchMode):
    """Keeps attention's results in a forward pass, or returns the kept ones where it is recomputed."""

    num_active: ClassVar[int] = 0

    def __init__(self, kept: deque[_Kept], *, recomputed: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._recomputed, self._num_weights = kept, recomputed, 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here."""
        return False

    def __enter__(self) -> Self:
        """Begin."""
        _KeptAttention.num_active += 1
        return cast("Self", super().__enter__())  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: object) -> None:
        """End."""
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _KeptAttention.num_active -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operator, and keep its result if it is attention's; or return the result that was kept."""
        is_kept = self._is_attention(func, args)
        if is_kept and self._recomputed:
            return _reused(self._kept.popleft())
        result = func(*args, **(kwargs or {}))
        if is_kept:
            aliases = tree_map_only(Tensor, _alias, result)
            self._kept.append(_Kept(aliases, _versions(aliases), _random_state(aliases)))
        return result

    def _is_attention(self, operator: Any, args: tuple[Any, ...]) -> bool:
        """Whether an operator's result is attention's: of a kernel, or of weights times values where it is eager.

        That is the first product after a softmax that has as many elements as the softmax.
        """
        name = _name(operator)
        if name in SOFTMAX:
            self._num_weights = args[0].numel()
        elif name == PRODUCT and args[0].numel() == self._num_weights:
            self._num_weights = 0
            return True
        return _is_kernel(name)


def attention_saved_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the contexts of a layer's forward pass and of its recomputation: the `context_fn` of a checkpoint."""
    kept: deque[_Kept] = deque()
    return _KeptAttention(kept, recomputed=False), _KeptAttention(kept, recomputed=True)


def is_keeping_attention() -> bool:
    """Whether operators that run now pass through Python, so that attention's results are kept."""
    return _KeptAttention.num_active > 0


def _reused(kept: _Kept) -> Any:
    """Return a kept result, and leave the random generator as its operator has left it."""
    if _versions(kept.result) != kept.versions:
        raise RuntimeError("attention's result was changed in place after it was kept for the backward pass")
    if kept.random_state is not None:
        torch.cuda.set_rng_state(kept.random_state, _first(kept.result).device)
    return kept.result


@cache
def _name(operator: Any) -> str:
    """Return `namespace.name` of an operator."""
    return f"{operator.namespace}.{operator.__name__.partition('.')[0]}"


@cache
def _is_kernel(name: str) -> bool:
    return KERNELS.fullmatch(name) is not None


def _first(result: Any) -> Tensor:
    return next(part for part in tree_leaves(result) if isinstance(part, Tensor))


def _alias(tensor: Tensor) -> Tensor:
    """Return another tensor of the same memory and version, without the graph that the first will get."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def _versions(result: Any) -> list[int]:
    return [part._version for part in tree_leaves(result) if isinstance(part, Tensor)]


def _random_state(result: Any) -> Tensor | None:
    """Return the state of the generator of attention's device; None where no kernel draws random numbers."""
    device = _first(result).device
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None
