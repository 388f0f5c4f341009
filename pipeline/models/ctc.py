"""Speech recognition by connectionist temporal classification, with transformers' models of raw sound (wav2vec 2.0)."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, RandomInput, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.models._support.task_models import TaskModel
from pipeline.models._support.tasks import ELSEWHERE

SAMPLES_PER_SECOND = 16_000


class Ctc(TaskModel):
    """AutoModelForCTC, on made-up sound with sequence_length made-up labels: corpus=random_vectors."""

    made_of: ClassVar[str] = (
        "made-up sound and labels, without SpecAugment's masks and without dropped layers, of which a run has a random "
        "number"
    )

    seconds_of_audio: PositiveFloat = 10.0
    """Length of each sound, of 16,000 samples a second."""
    freeze_feature_encoder: bool = True
    """Whether the convolutions that read the sound are not trained, as in transformers' example."""

    def _described(self, name: str, config: Any) -> Description:
        if not getattr(config, "conv_stride", None):
            raise InvalidInputError(
                f"ctc knows the inputs of models of raw sound (wav2vec2, hubert, wavlm), and {name} is a "
                f"{config.model_type}; {ELSEWHERE}"
            )
        num_samples = num_frames = round(self.seconds_of_audio * SAMPLES_PER_SECOND)
        for width, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
            num_frames = (num_frames - width) // stride + 1
        if num_frames < 4:
            raise InvalidInputError(
                f"ctc.seconds_of_audio must give some frames, and {self.seconds_of_audio:g} s are {max(num_frames, 0)} "
                f"of {name}; set ctc.seconds_of_audio=1 or more"
            )
        blank = config.pad_token_id
        first, end = (1, config.vocab_size) if blank == 0 else (0, blank)
        labels = RandomInput("labels", (None,), num_values=end, first=first)
        return Description(
            inputs=(RandomInput("input_values", (num_samples,)), labels),
            max_sequence_length=num_frames * 3 // 5,  # equal labels in a row need a frame between them
        )

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model with the loss of its class, for labels that all have one length."""
        built = super().build(name, vocabulary_size)
        module: Any = built.module
        if self.freeze_feature_encoder:
            module.freeze_feature_encoder()
        return replace(built, loss=_loss)

    def _completed(self, config: Any) -> Any:
        config.ctc_loss_reduction = "mean"
        config.apply_spec_augment = False
        config.layerdrop = 0.0
        if config.pad_token_id is None:
            config.pad_token_id = 0
        return config


def _loss(module: nn.Module, batch: Batch, num_targets: int) -> Tensor:
    """Return the summed loss divided by the window's number of labels: ctc_loss_reduction=mean, of labels alike.

    The model's own would read the labels' lengths.
    """
    config: Any = module.config
    logits_BTV: Tensor = module(input_values=batch["input_values"]).logits
    log_probs_TBV = F.log_softmax(logits_BTV, dim=-1, dtype=torch.float32).transpose(0, 1)
    num_frames, num_examples, _ = log_probs_TBV.shape
    labels = batch["labels"]
    with torch.backends.cudnn.flags(enabled=False):  # as transformers does
        loss = F.ctc_loss(
            log_probs_TBV,
            labels,
            (num_frames,) * num_examples,  # type: ignore[arg-type]
            (labels.shape[1],) * num_examples,  # type: ignore[arg-type]
            blank=config.pad_token_id,
            reduction="sum",
            zero_infinity=config.ctc_zero_infinity,
        )
    return loss / num_targets
