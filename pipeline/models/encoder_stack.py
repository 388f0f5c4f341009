"""A stack of torch.nn.TransformerEncoderLayer: an example of a model that is not from transformers."""

from typing import ClassVar

import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, Model, RandomInput, Trainable
from pipeline.base.errors import InvalidInputError


class EncoderStack(Model):
    """Pre-norm torch.nn.TransformerEncoderLayer modules, trained on vectors with the mean squared error."""

    names: ClassVar[tuple[str, ...]] = ("encoder_stack",)

    num_layers: PositiveInt = 6
    """Layers in the stack."""
    width: PositiveInt = 768
    """Channels of each layer."""
    num_heads: PositiveInt = 12
    """Attention heads of each layer."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout probability."""

    def describe(self, name: str) -> Description:
        """Return the description that the settings give."""
        if self.width % self.num_heads:
            raise InvalidInputError(
                f"encoder_stack.num_heads must divide encoder_stack.width: {self.num_heads} does not divide "
                f"{self.width}; change one of them"
            )
        return Description(
            inputs=(RandomInput("inputs", (None, self.width)), RandomInput("targets", (None, self.width))),
        )

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the stack; `vocabulary_size` is not used."""
        layers = [
            nn.TransformerEncoderLayer(
                self.width, self.num_heads, 4 * self.width, self.dropout, batch_first=True, norm_first=True
            )
            for _ in range(self.num_layers)
        ]
        return Trainable(module=nn.Sequential(*layers), layers=tuple(layers), loss=_squared_error)


def _squared_error(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed squared error divided by the window's number of target elements."""
    outputs_BTC: Tensor = module(batch["inputs"])
    return F.mse_loss(outputs_BTC.float(), batch["targets"], reduction="sum") / num_targets
