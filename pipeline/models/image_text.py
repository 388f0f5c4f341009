"""Language models that read images among their tokens, of transformers: LLaVA."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.base.contracts import Batch, Description, Prepared, RandomInput, Sequences, Trainable
from pipeline.base.errors import InvalidInputError
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.models._support.heads import token_loss
from pipeline.models._support.task_models import TaskModel
from pipeline.models._support.tasks import ELSEWHERE


class ImageText(TaskModel):
    """AutoModelForImageTextToText, on made-up images, each among sequence_length tokens with its own."""

    made_of: ClassVar[str] = "a made-up image at the beginning of each made-up text, which alone is predicted"
    types: ClassVar[tuple[str, ...]] = ("llava",)
    """One image of one size, and as many tokens for it in each sequence as it has patches."""
    instead: ClassVar[str] = (
        f"it puts images among tokens in a way of its own, so name a folder with its text model, {ELSEWHERE}"
    )

    freeze_vision: bool = False
    """Whether the encoder of images is not trained."""

    def _described(self, name: str, config: Any) -> Description:
        vision = config.vision_config
        return Description(
            inputs=(
                RandomInput("pixel_values", (vision.num_channels, vision.image_size, vision.image_size)),
                RandomInput("input_ids", (None,), num_values=config.image_token_id),
            ),
            max_sequence_length=config.text_config.max_position_embeddings,
        )

    def inputs(self, name: str, prepared: Prepared, seed: int) -> Prepared:
        """Return the examples with tokens that stand for the image at the beginning of each text.

        Raises:
            InvalidInputError: the image leaves no room for text.

        """
        config, length = self.configuration(name, 1), len(prepared.train.batch([0])["input_ids"][0])
        num_tokens = _num_image_tokens(config)
        if length < num_tokens + 2:
            longest = config.text_config.max_position_embeddings
            remedy = f"set sequence_length to more, up to {longest}"
            if longest < num_tokens + 2:
                remedy = "it has too few positions for its own images, so name another model"
            raise InvalidInputError(
                f"sequence_length must hold the {num_tokens} tokens of an image of {name} and some of text, and is "
                f"{length}; {remedy}"
            )
        train, held_out = (
            _ImageTexts(each, num_tokens, config.image_token_id) for each in (prepared.train, prepared.held_out)
        )
        return replace(prepared, train=train, held_out=held_out, digest=f"{prepared.digest}-{num_tokens}-{self.task}")

    def build(self, name: str, vocabulary_size: int) -> Trainable:
        """Return the model with the loss of the next token."""
        built = super().build(name, vocabulary_size)
        module: Any = built.module
        if self.freeze_vision:
            module.model.vision_tower.requires_grad_(False)
        return replace(built, loss=partial(token_loss, _logits))

    def _completed(self, config: Any) -> Any:
        if config.image_token_id >= config.text_config.vocab_size and not self.pretrained:
            config.image_token_id = config.text_config.vocab_size - 1  # made-up weights have no other token for it
        return config


def _num_image_tokens(config: Any) -> int:
    """Return how many tokens stand for an image: its patches and, unless they are left out, the token of its class."""
    num_patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
    return int(num_patches + (config.vision_feature_select_strategy == "full"))


class _ImageTexts(Sequences):
    """Images with texts, whose first tokens stand for the image and are no targets."""

    def __init__(self, examples: Sequences, num_image_tokens: int, token: int) -> None:
        self._examples, self._num_image_tokens, self._token = examples, num_image_tokens, token

    def __len__(self) -> int:
        return len(self._examples)

    def batch(self, rows: Sequence[int]) -> Batch:
        """Return `pixel_values`, `input_ids` and `labels`."""
        batch = self._examples.batch(rows)
        labels_BT = batch["input_ids"].clone()
        labels_BT[:, : self._num_image_tokens] = IGNORED_LABEL
        batch["input_ids"][:, : self._num_image_tokens] = self._token
        return {**batch, "labels": labels_BT}

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return B x T tokens, and the targets."""
        return batch["labels"].numel(), int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())


def _logits(module: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of images with texts.

    The images are put where their tokens are, at the beginning: transformers looks for these, and reads their number.
    """
    model: Any = module
    tokens_BTC = model.get_input_embeddings()(batch["input_ids"])
    images_BIC = torch.stack(
        list(model.model.get_image_features(batch["pixel_values"], return_dict=True).pooler_output)
    )
    inputs_BTC = torch.cat([images_BIC.to(tokens_BTC.dtype), tokens_BTC[:, images_BIC.shape[1] :]], dim=1)
    logits_BTV: Tensor = model(inputs_embeds=inputs_BTC, use_cache=False).logits
    return logits_BTV
