"""What a technique is: settings, and a function from Step to Step."""

import ast
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from operator import methodcaller
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final, get_args, get_origin

import torch
from torch import nn
from torch.optim import Optimizer

from pipeline.base.contracts import Hardware, Model, Trainable
from pipeline.base.ranks import Ranks
from pipeline.base.settings import Settings

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Context = Callable[[], AbstractContextManager[object]]
"""Makes a context manager."""
MakeOptimizer = Callable[[nn.Module], Optimizer]
"""Makes the optimizer of a model's parameters."""
ROUNDOFF = {"fp32": 2.0**-17, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Relative tolerance of a loss by number format: half the spacing of its numbers; for fp32 that of a sum of 64."""


def unchanged(*_: object) -> None:
    """Leave the optimizer, or a part of the model, as it is."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one optimizer step is made of; a technique returns a copy with some parts replaced."""

    trainable: Trainable
    device: torch.device
    micro_batch_size: int
    """Sequences in one forward pass."""
    accumulation_steps: int
    """Forward and backward passes in one optimizer step, of each rank."""
    scaler: torch.amp.GradScaler
    """Scales losses and unscales gradients; a disabled one leaves both as they are."""
    make_optimizer: MakeOptimizer
    """Called once, after all techniques have been applied. Its optimizer's learning rate is set before each step.

    An optimizer that updates parameters during the backward pass frees their gradients and has a step() without effect.
    """
    change_optimizer: Callable[[Optimizer], object] = unchanged
    """Called with the optimizer that make_optimizer has made, before its first step."""
    forward_context: Context = nullcontext
    """Entered around every forward pass."""
    run_context: Context = nullcontext
    """Entered once, around all optimizer steps."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that take it together."""
    accumulation_context: Context = nullcontext
    """Entered around every forward pass of an optimizer step but the last one."""
    zero_gradients: Callable[[Optimizer], None] = methodcaller("zero_grad")
    """Called after each update."""
    divide: Callable[[nn.Module, "DeviceMesh"], None] = unchanged
    """Divides each matrix of a part of the model among the ranks of a mesh, and moves this rank's part to its device.

    It is called with each layer, and then with the whole model.
    """

    def with_forward_context(self, context: Context) -> Self:
        """Return a copy that enters `context` around every forward pass, inside the existing contexts."""
        return replace(self, forward_context=_stacked(self.forward_context, context))

    def with_changed_optimizer(self, change: Callable[[Optimizer], object]) -> Self:
        """Return a copy that calls `change` with the optimizer that all techniques have made, after earlier changes."""
        earlier = self.change_optimizer

        def both(optimizer: Optimizer) -> None:
            earlier(optimizer)
            change(optimizer)

        return replace(self, change_optimizer=both)

    def with_run_context(self, context: Context) -> Self:
        """Return a copy that enters `context` around the run, inside the existing contexts."""
        return replace(self, run_context=_stacked(self.run_context, context))


def source_of(*parts: Any) -> str:
    """Return the source of modules, or of functions and classes with the imports that they need, for an export."""
    sources = [_without_docstring(part) if inspect.ismodule(part) else inspect.getsource(part) for part in parts]
    alone = [part for part in parts if not inspect.ismodule(part)]
    tree = ast.parse("".join(map(inspect.getsource, alone)))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = dict.fromkeys(line for part in alone for line in _imports_of(part, used))
    own = [line for line in imports if line.split()[1].partition(".")[0] in sys.stdlib_module_names]
    others = [line for line in imports if line not in own]
    head = "\n\n".join("\n".join(lines) for lines in (own, others) if lines)
    code = "\n\n\n".join(part.strip() for part in (head, *sources) if part)
    return re.sub(r"  # type: ignore(\[[^]]*\])?", "", code)


def _without_docstring(module: ModuleType) -> str:
    source = inspect.getsource(module)
    return "\n".join(source.splitlines()[ast.parse(source).body[0].end_lineno :])


def _imports_of(part: Any, used: set[str]) -> Iterator[str]:
    """Yield the imports of the module of a function or class, without the names that are not used."""
    for node in ast.parse(inspect.getsource(sys.modules[part.__module__])).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [one for one in node.names if (one.asname or one.name.partition(".")[0]) in used]
            if node.names:
                yield ast.unparse(node)


def without_layers(technique: "Technique", settings: Any, model: Model) -> Iterator[str]:
    """Yield that the model has no layers, for a technique that changes those."""
    if technique.active and not model.has_layers(settings.model):
        switch = next(iter(type(technique).model_fields))
        yield (
            f"{switch}={getattr(technique, switch)} changes the identical layers of a model, and none are known of "
            f"{settings.model}; set {switch}={type(technique).model_fields[switch].default}, or let a function of "
            "yours return a Trainable with its layers"
        )


def idle_settings(technique: type["Technique"], value: Any) -> dict[str, Any]:
    """Return the settings that mean nothing beside a value of a technique's first one, each with a value of their own.

    `qlora_...` is a setting of the value `qlora`; one without such a name is of every value but the default.
    """
    (_, switch), *others = technique.model_fields.items()
    values = get_args(switch.annotation)
    another = next((one for one in values if one != switch.default), True)
    idle = {}
    for name, _ in others:
        owners = [one for one in values if name.startswith(f"{one}_")]
        if value == switch.default or (owners and not any(one in str(value) for one in owners)):
            idle[name] = max(owners, key=len, default=another)
    return idle


def without_idle(technique: "Technique", *but: str) -> Iterator[str]:
    """Yield that a setting was changed which means nothing beside the first one, `but` for these."""
    switch, given = next(iter(technique))
    for name, owner in idle_settings(type(technique), given).items():
        value, default = getattr(technique, name), type(technique).model_fields[name].default
        if value != default and name not in but:
            is_set = f"{name}={str(value).lower()} is a setting of {switch}={owner}, and {switch} is {given}"
            yield f"{is_set}; set {switch}={owner} or {name}={str(default).lower()}"


def _stacked(*contexts: Context) -> Context:
    """Return a context that enters all of these, the first one outermost."""

    @contextmanager
    def enter() -> Iterator[None]:
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context())
            yield

    return enter


class Mathematics(StrEnum):
    """How the training with a technique differs from the training without it."""

    EXACT = "exact"
    """Equal but for the order of sums."""
    ROUNDING = "rounding"
    """The same formulas in another rounding."""
    DIFFERENT = "different"
    """Another training: other formulas, or other trained parameters."""

    def includes(self, other: "Mathematics") -> bool:
        """Whether a training that differs as much as `other` differs at most as much as this."""
        order = list(Mathematics)
        return order.index(other) <= order.index(self)


class Stage(IntEnum):
    """The order in which techniques are applied, by what they change."""

    WEIGHTS = 1
    ADAPTER = 2
    MODEL = 3
    LOSS = 4
    RECOMPUTATION = 5
    COMPILE = 6
    OPTIMIZER = 7
    UPDATE = 8
    """When the optimizer updates, whichever it is."""
    RANKS = 9
    """What each rank has of the model, whatever it has become, on its device; before, the model is on the CPU."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What a technique adds to the files for one framework; the default adds nothing."""

    code: str = ""
    """Python source for the top level of the file: imports, functions, classes."""
    prepare: str = ""
    """Python statements that change `model` in place, before its optimizer is made.

    `{layers}` stands for an expression for the names of its layers.
    """
    optimizer: str = "{optimizer}"
    """A Python expression for the optimizer of `model`.

    `{optimizer}` stands for the expression without the technique, `{learning_rate}` and `{weight_decay}` for numbers,
    `{layers}` for an expression for the names of the model's layers.
    """
    finished_optimizer: str = "{optimizer}"
    """A Python expression likewise, for what is made of the optimizer of all techniques."""
    loss: str = ""
    """A Python expression for the summed loss of `model` on `ids_BT` and `labels_BT`, in the plain script.

    `factor` is what the backward pass multiplies it by: the loss scale, divided by the number of targets.
    """
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the framework's own: of TrainingArguments or Lightning's Trainer, keys of the JSON or YAML file."""
    notes: tuple[str, ...] = ()
    """What a user of the files needs to know, a sentence each."""

    @property
    def needs_python(self) -> bool:
        """Whether a file without code, such as JSON, cannot express it: it has no arguments, but code."""
        changes_optimizer = self.optimizer != "{optimizer}" or self.wraps_optimizer
        return not self.arguments and bool(self.code or self.prepare or changes_optimizer)

    @property
    def wraps_optimizer(self) -> bool:
        """Whether it makes something of the optimizer of all techniques, and of the parameters that this has."""
        return self.finished_optimizer != "{optimizer}"


class Technique(Settings, ABC):
    """One way to train in less memory or time; its fields are settings of every entry point.

    Subclass it in a file of pipeline/techniques/, or in a module of your own that FITPROOF_TECHNIQUES names.
    """

    stage: ClassVar[Stage] = Stage.MODEL
    """When it is applied; techniques of one stage are applied in the order of their names."""

    @property
    @abstractmethod
    def mathematics(self) -> Mathematics:
        """How the training with these settings differs from the training without the technique."""

    @final
    @property
    def active(self) -> bool:
        """Whether any of its settings differs from its default."""
        return self != type(self)()

    @property
    def number_format(self) -> str | None:
        """The number format in which it rounds, one of ROUNDOFF's; None if it leaves that open."""
        return None

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield the reasons why a run cannot use it, by default none; only the first one is shown.

        `settings` has all settings of the run by name, as attributes, and `model` is the family of its model. Each
        reason states rule, value and remedy.
        """
        yield from ()

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield what a reader of predictions on `hardware` needs to know, a sentence each; arguments as of refusals().

        It is what it leaves out of the model, or what a prediction of memory does not see.
        """
        yield from ()

    @property
    def untimed(self) -> tuple[str, ...]:
        """The settings whose time is not that of the work which a prediction counts; they may have any effect."""
        return ()

    @classmethod
    def values_to_try(cls, setting: str, hardware: Hardware) -> tuple[Any, ...]:
        """Return the values of `setting` that `auto` means for `hardware`: by default, all values of a Literal type."""
        annotation = cls.model_fields[setting].annotation
        kinds = [annotation, *get_args(annotation)]  # the setting may be optional
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that a run's process needs before its first CUDA call."""
        return {}

    def export(self, target: str) -> Exported | None:
        """Return what the files for a framework add for it; None if they cannot express it.

        `target` is the name of a file in pipeline/export/targets/, such as `pytorch`.
        """
        return None

    def apply(self, step: Step) -> Step:
        """Return `step` with this technique applied: here nothing of the step changes."""
        return step
