"""Adapters: small trained matrices beside the frozen linear layers of a model, by peft."""

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import AfterValidator, Field, PositiveInt
from torch.utils._python_dispatch import _disable_current_modes

from pipeline.base.contracts import Hardware, Model, Trainable
from pipeline.base.technique import Exported, Mathematics, Stage, Step, Technique, source_of, without_idle
from pipeline.base.user_functions import once_of_each
from pipeline.techniques._support import lora, quantized_layers
from pipeline.techniques._support.lora import add_adapters, is_target, linear_layers, outside_layers
from pipeline.techniques._support.quantized_layers import quantize_layers

FOUR_BIT_CAPABILITY = (6, 0)
"""CUDA compute capability from which on bitsandbytes has kernels for 4-bit weights (the table of its README)."""
EIGHT_BIT_CAPABILITY = (7, 5)
"""The same for 8-bit weights."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _checked_targets(value: str) -> str:
    if re.fullmatch(r"[\w.]+(,[\w.]+)*", value) is None:
        raise ValueError("must be all, attention, or names of linear layers separated by commas, as q_proj,v_proj")
    return value


class Adapter(Technique):
    """Train the model itself, or low-rank matrices (LoRA) that are added to linear layers of the frozen model.

    With QLoRA (https://arxiv.org/abs/2305.14314) the weights of the linear layers inside its layers have 4 bits, or 8.
    """

    stage: ClassVar[Stage] = Stage.ADAPTER

    adapter: Literal["none", "lora", "qlora"] = "none"
    """none: all weights are trained; lora: adapters alone; qlora: and the frozen layers are in 4 or 8 bits."""
    adapter_rank: PositiveInt = 16
    """Rank of the two matrices of an adapter."""
    adapter_alpha: PositiveInt = 32
    """What an adapter adds is multiplied by adapter_alpha / adapter_rank."""
    adapter_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability of an adapter's inputs."""
    adapter_targets: Annotated[str, AfterValidator(_checked_targets)] = "all"
    """Linear layers with an adapter: all or attention (of the model's identical layers), or names as q_proj,v_proj.

    A name can also be that of the head or of an embedding outside of the layers: all,lm_head,embed_tokens.
    """
    adapter_weights: Literal["float32", "bfloat16"] = "float32"
    """Type of the adapters' parameters, and so of their gradients and optimizer state."""
    qlora_weights: Literal["nf4", "int8"] = "nf4"
    """nf4: 4 bits a weight; int8: bitsandbytes' 8 bits (LLM.int8()), on a GPU alone."""
    qlora_double_quantization: bool = True
    """Whether the scales of the 4-bit weights have 8 bits: 0.37 bits less for each weight."""
    qlora_float32_rest: bool = True
    """Whether bfloat16 norms, embeddings and head become float32 (as peft does), and with them logits and loss."""

    @property
    def mathematics(self) -> Mathematics:
        """Other parameters are trained."""
        return Mathematics.DIFFERENT if self.adapter != "none" else Mathematics.EXACT

    @property
    def number_format(self) -> str | None:
        """Bfloat16, if the adapters are, also without autocast."""
        return "bf16" if self.adapter != "none" and self.adapter_weights == "bfloat16" else None

    def refusals(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield which settings contradict it, which package or kernel is absent, and which layers the model lacks."""
        if self.adapter != "none" and self.adapter_weights == "bfloat16" and settings.precision == "fp16":
            yield (
                "adapter_weights=bfloat16 needs no loss scaling, and precision=fp16 scales the loss and rounds the "
                "adapters a second time; set precision=bf16 or fp32, or adapter_weights=float32"
            )
        yield from without_idle(self)
        if self.adapter == "qlora":
            yield from self._refusals_of_qlora(settings)
        missing = [name for name in self._packages if find_spec(name) is None]
        if missing:
            yield (
                f"adapter={self.adapter} needs the package {missing[0]}, which is not installed; install it (pip "
                f"install '.[finetune]' in the checkout), or set adapter={'none' if 'peft' in missing else 'lora'}"
            )
        if self.adapter == "qlora":
            yield from self._refusals_of_kernels(hardware)
        if self.adapter != "none":
            yield from self._refusals_of_targets(model, settings.model)

    def _refusals_of_qlora(self, settings: Any) -> Iterator[str]:
        if self.qlora_weights == "int8" and not self.qlora_double_quantization:
            yield (
                "qlora_double_quantization is of 4-bit weights, and qlora_weights is int8; set "
                "qlora_double_quantization=true, which changes nothing there"
            )
        if settings.compile != "none":
            yield (
                "torch compiles a 4-bit layer anew for each shape, and after eight it computes without compilation, "
                f"and adapter is qlora and compile {settings.compile}; set compile=none or adapter=lora"
            )
        if not self.qlora_float32_rest and settings.weights == "float32":
            yield (
                "qlora_float32_rest=false leaves norms, embeddings and head in 16 bits, and with weights=float32 they "
                "are in float32 already; set weights=bfloat16 or qlora_float32_rest=true"
            )

    def _refusals_of_kernels(self, hardware: Hardware) -> Iterator[str]:
        is_older = hardware.is_older_than(EIGHT_BIT_CAPABILITY)
        if self.qlora_weights == "int8" and (hardware.capability is None or is_older):
            yield (
                "qlora_weights=int8 needs bitsandbytes' product of 8-bit numbers, from compute capability 7.5 (Turing) "
                f"on, and the device is {hardware.name}; set qlora_weights=nf4"
            )
        if hardware.is_older_than(FOUR_BIT_CAPABILITY):
            yield (
                "adapter=qlora needs bitsandbytes' kernels for 4-bit weights, from compute capability 6.0 (Pascal) on, "
                f"and {hardware.name} is older; set adapter=lora"
            )

    def _refusals_of_targets(self, model: Model, name: str) -> Iterator[str]:
        inside = _inside_layers(model, name)
        names, targets = inside.linear, self.adapter_targets.split(",")
        outside = {} if {*targets} <= {"all", "attention"} else dict.fromkeys(inside.outside)
        missing = [target for target in targets if not any(is_target(each, target) for each in (*names, *outside))]
        rule = f"adapter_targets={self.adapter_targets} must name linear layers inside the layers of {name}"
        if missing and not names:
            yield (
                f"{rule}, and they have none that an adapter can be added to (torch's own attention and transformer "
                "layers read the weights of theirs and do not call them); set adapter=none"
            )
        elif missing:
            yield (
                f"{rule}, or some outside of them, and {', '.join(missing)} matches none of {', '.join(names)}, nor of "
                f"{', '.join(inside.outside)}; set adapter_targets to some of them"
            )

    @property
    def _packages(self) -> tuple[str, ...]:
        return {"none": (), "lora": ("peft",), "qlora": ("bitsandbytes", "peft")}[self.adapter]

    @property
    def num_bits(self) -> int:
        """Bits of a quantized weight."""
        return 4 if self.qlora_weights == "nf4" else 8

    def notes(self, settings: Any, hardware: Hardware, model: Model) -> Iterator[str]:
        """Yield how many parameters of the layers are not quantized, as those of fused experts, and their type."""
        if self.adapter != "qlora" or not (inside := _inside_layers(model, settings.model)).others:
            return
        then = (
            "become float32, as in peft's prepare_model_for_kbit_training; qlora_float32_rest=false keeps their 16 bits"
            if self.qlora_float32_rest
            else "keep their 16 bits"
        )
        yield (
            f"adapter=qlora quantizes linear layers, as transformers does: {inside.num_in_others:,} of the "
            f"{inside.num_parameters:,} parameters in the layers of {settings.model} are in none "
            f"({', '.join(inside.others)}), are not quantized, and {then}"
        )

    def export(self, target: str) -> Exported:
        """Return the functions that add the adapters and leave what is frozen to no optimizer, for any framework.

        TRL and axolotl add them themselves, by peft's names of these settings.
        """
        if target in ("trl", "axolotl"):
            return Exported()
        arguments = [
            "model",
            "[model.get_submodule(name) for name in {layers}]",
            repr(self.adapter_targets),
            str(DTYPES[self.adapter_weights]),
            *(f"{name}={value}" for name, value in self._arguments().items()),
        ]
        code, statements = [lora], [f"add_adapters({', '.join(arguments)})"]
        if self.adapter == "qlora":
            code.insert(0, quantized_layers)
            statements.insert(0, self._quantizing())
        return Exported(
            code=source_of(*code),
            prepare="\n".join(statements),
            optimizer="without_frozen({optimizer})",
            notes=("The adapters alone, to be saved: peft.get_peft_model_state_dict(model).",),
        )

    def exported_quantizing(self) -> Exported:
        """Return the functions and the statement that replace the linear layers of `model` by quantized ones."""
        return Exported(code=source_of(quantized_layers, linear_layers), prepare=self._quantizing())

    def _quantizing(self) -> str:
        arguments = "".join(f"    {name}={value},\n" for name, value in self._quantization().items())
        return (
            "layers = [model.get_submodule(name) for name in {layers}]\n"
            "quantize_layers(\n    model,\n    ((layer, linear_layers(layer)) for layer in layers),\n"
            f"{arguments})"
        )

    def _quantization(self) -> dict[str, Any]:
        return {
            "num_bits": self.num_bits,
            "double_quantization": self.qlora_double_quantization,
            "float32_rest": self.qlora_float32_rest,
        }

    def _arguments(self) -> dict[str, Any]:
        """Return the settings by the names of peft's LoraConfig."""
        return {"r": self.adapter_rank, "lora_alpha": self.adapter_alpha, "lora_dropout": self.adapter_dropout}

    def apply(self, step: Step) -> Step:
        """Freeze the model and add the adapters."""
        if self.adapter != "none":
            self.add_to(step.trainable)
        return step

    def add_to(self, trainable: Trainable) -> None:
        """Freeze a model and add the adapters, to layers of 4-bit weights if it is QLoRA."""
        with _disable_current_modes():  # the imports make tensors, which are no part of the model
            import_module("peft")  # it imports bitsandbytes
        if self.adapter == "qlora":
            layers = ((layer, linear_layers(layer)) for layer in trainable.layers)
            quantize_layers(trainable.module, layers, **self._quantization())
        dtype = DTYPES[self.adapter_weights]
        add_adapters(trainable.module, trainable.layers, self.adapter_targets, dtype, **self._arguments())


class _Inside(NamedTuple):
    """The parameters inside the layers of a model."""

    linear: tuple[str, ...]
    """Names of linear layers inside a layer."""
    others: tuple[str, ...]
    """Names of its other parameters with several axes, as those of fused experts."""
    num_in_others: int
    """Parameters in those, of all layers."""
    num_parameters: int
    """Parameters of all layers."""
    outside: tuple[str, ...]
    """Names of the linear layers and embeddings outside of the layers."""


@once_of_each
def _inside_layers(model: Model, name: str) -> _Inside:
    """Return the parameters inside the layers of a model; raise InvalidInputError if it cannot be built."""
    built = model.structure(name)
    linear, others, num_in_others = dict[str, None](), dict[str, None](), 0
    for layer in built.layers:
        found = linear_layers(layer)
        weights = {part.weight for part in found.values()}
        rest = [(each, one) for each, one in layer.named_parameters() if one.dim() > 1 and one not in weights]
        linear |= dict.fromkeys(found)
        others |= dict.fromkeys(each for each, _ in rest)
        num_in_others += sum(one.numel() for _, one in rest)
    num_parameters = sum(one.numel() for layer in built.layers for one in layer.parameters())
    outside = tuple(outside_layers(built.module, built.layers))
    return _Inside(tuple(linear), tuple(others), num_in_others, num_parameters, outside)
