"""Models that learn which image belongs to which text, of transformers: CLIP and SigLIP."""

from dataclasses import replace
from typing import Any, ClassVar

from pydantic import PositiveInt
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, RandomInput, Trainable
from pipeline.models._support.task_models import TaskModel, set_image_size


class Contrastive(TaskModel):
    """AutoModelForZeroShotImageClassification, on made-up images, each with sequence_length tokens."""

    made_of: ClassVar[str] = (
        "made-up images and texts, of which each is compared with all others of its micro-batch, which must be the "
        "whole batch"
    )
    types: ClassVar[tuple[str, ...]] = ("clip", "siglip", "chinese_clip", "altclip")
    """Images of one size, and token ids."""

    image_size: PositiveInt | None = None
    """Height and width of the images in pixels; none: the configuration's. Another one needs random weights."""

    def _described(self, name: str, config: Any) -> Description:
        vision, text = config.vision_config, config.text_config
        return Description(
            inputs=(
                RandomInput("pixel_values", (vision.num_channels, vision.image_size, vision.image_size)),
                RandomInput("input_ids", (None,), num_values=text.vocab_size),
            ),
            max_sequence_length=text.max_position_embeddings,
            needs_whole_batch=True,
        )

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model with the loss of its class."""
        return replace(super().build(name, vocabulary_size), loss=_loss)

    def _completed(self, config: Any) -> Any:
        if self.image_size is not None:
            set_image_size(self, config.vision_config, self.image_size)
        return config


def _loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the mean loss of a batch that is the whole one; the targets of its texts are their tokens."""
    mean: Tensor = module(**batch, return_loss=True).loss
    return mean.float() * batch["input_ids"].numel() / num_targets
