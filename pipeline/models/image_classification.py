"""Image classifiers of transformers, such as ViT."""

from typing import Any, ClassVar

from pydantic import Field, PositiveInt

from pipeline.base.contracts import Description, RandomInput
from pipeline.models._support.task_models import TaskModel, set_image_size

USUAL_SIZE = 224


class ImageClassification(TaskModel):
    """AutoModelForImageClassification, on made-up images: corpus=random_vectors."""

    made_of: ClassVar[str] = "made-up images and labels"

    image_size: PositiveInt | None = None
    """Height and width of the images in pixels; none: the configuration's, or 224."""
    num_labels: PositiveInt | None = Field(default=None, ge=2)
    """Number of classes; none: the configuration's."""

    def _described(self, name: str, config: Any) -> Description:
        size = self.image_size or getattr(config, "image_size", None) or USUAL_SIZE
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(config, "num_channels", 3)
        labels = RandomInput("labels", (), num_values=config.num_labels)
        return Description(inputs=(RandomInput("pixel_values", (channels, height, width)), labels))

    def _completed(self, config: Any) -> Any:
        if self.image_size is not None and getattr(config, "image_size", None) is not None:
            set_image_size(self, config, self.image_size)
        if self.num_labels is not None:
            config.num_labels = self.num_labels
        config.problem_type = "single_label_classification"
        return config
