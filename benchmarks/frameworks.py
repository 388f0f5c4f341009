"""The same training in transformers' Trainer, in Accelerate and in Lightning, as their users write it.

Each function trains a model in place and returns the loss of every forward pass, divided as the framework divides it
before its backward pass. Logging, saving, evaluation, progress bars and reports are off; the optimizer, its schedule
and the reading of rows are the same in all.
"""

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from bare import checkpoint_layers
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from pipeline.base.contracts import Batch, Prepared
from pipeline.config.experiment import Experiment
from pipeline.config.settings import RunSettings
from pipeline.data._support.sequences import IGNORED_LABEL
from pipeline.training.loop import rows_of_step


class Rows(Dataset[Batch]):
    """The rows of all optimizer steps, in the order in which Fitproof reads them."""

    def __init__(self, experiment: Experiment, prepared: Prepared) -> None:
        settings, size = experiment.settings, experiment.effective_batch_size
        steps = [rows_of_step(len(prepared.train), n, size, settings.seed) for n in range(settings.num_steps)]
        self._sequences, self._rows = prepared.train, [row for rows in steps for row in rows]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> Batch:
        return {name: tensor[0] for name, tensor in self.__getitems__([number]).items()}

    def __getitems__(self, numbers: Sequence[int]) -> Batch:
        """Return the batch of these rows at once, so that no data loader takes it apart."""
        return self._sequences.batch([self._rows[number] for number in numbers])


def as_it_is(batch: Batch) -> Batch:
    """Collate what Rows gives: it is a batch already."""
    return batch


def loader(experiment: Experiment, prepared: Prepared) -> DataLoader[Batch]:
    """Return the micro-batches of all optimizer steps."""
    return DataLoader(
        Rows(experiment, prepared),
        batch_size=experiment.settings.micro_batch_size,
        collate_fn=as_it_is,
        pin_memory=experiment.device.type == "cuda",
    )


def windows(batches: Iterator[Batch], accumulation_steps: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of one optimizer step after the other."""
    for first in batches:
        yield [first, *(next(batches) for _ in range(accumulation_steps - 1))]


def make_optimizer(module: nn.Module, settings: RunSettings) -> tuple[Optimizer, LambdaLR]:
    """Return the optimizer of all peers, and its warm-up."""
    optimizer = AdamW(module.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.learning_rate_warmup_steps))


def with_trainer(module: nn.Module, experiment: Experiment, prepared: Prepared) -> list[Tensor]:
    """Train in Hugging Face's Trainer, which divides each loss by its count of the window (num_items_in_batch)."""
    from transformers import Trainer, TrainingArguments

    settings, kept = experiment.settings, []

    class KeepingTrainer(Trainer):  # type: ignore[misc]
        """Keeps the losses that it would log."""

        def training_step(self, *given: Any, **named: Any) -> Tensor:
            kept.append(super().training_step(*given, **named))
            return kept[-1]

    _checkpoint(module, settings)
    with tempfile.TemporaryDirectory() as folder:
        KeepingTrainer(
            model=module,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=settings.num_steps,
                per_device_train_batch_size=settings.micro_batch_size,
                gradient_accumulation_steps=settings.accumulation_steps,
                bf16=settings.precision == "bf16",
                max_grad_norm=settings.max_grad_norm,
                seed=settings.seed,
                use_cpu=experiment.device.type == "cpu",
                dataloader_pin_memory=experiment.device.type == "cuda",
                train_sampling_strategy="sequential",
                remove_unused_columns=False,
                logging_strategy="no",
                logging_nan_inf_filter=False,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            data_collator=as_it_is,
            train_dataset=Rows(experiment, prepared),
            optimizers=make_optimizer(module, settings),
        ).train()
    return kept


def with_accelerate(module: nn.Module, experiment: Experiment, prepared: Prepared) -> list[Tensor]:
    """Train with Accelerate, dividing by the window's targets as its guide to accumulation does for uneven rows."""
    from accelerate import Accelerator

    settings = experiment.settings
    accelerator = Accelerator(
        cpu=experiment.device.type == "cpu",
        mixed_precision="bf16" if settings.precision == "bf16" else "no",
        gradient_accumulation_steps=settings.accumulation_steps,
    )
    _checkpoint(module, settings)
    model, optimizer, scheduler, batches = accelerator.prepare(
        module, *make_optimizer(module, settings), loader(experiment, prepared)
    )
    kept = []
    for window in windows(iter(batches), settings.accumulation_steps):
        num_targets = sum((batch["labels"][:, 1:] != IGNORED_LABEL).sum() for batch in window)
        for batch in window:
            loss = model(**batch, num_items_in_batch=num_targets).loss
            accelerator.backward(loss * settings.accumulation_steps)  # which it divides by that again
            kept.append(loss.detach())
        accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return kept


def with_lightning(module: nn.Module, experiment: Experiment, prepared: Prepared) -> list[Tensor]:
    """Train with Lightning, which divides each forward pass's mean loss by their number."""
    from lightning.pytorch import LightningModule, Trainer

    settings, kept = experiment.settings, []

    class Training(LightningModule):
        """What a user of Lightning writes."""

        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def training_step(self, batch: Batch, number: int) -> Tensor:
            loss: Tensor = self.model(**batch).loss
            kept.append(loss.detach() / settings.accumulation_steps)
            return loss

        def configure_gradient_clipping(
            self,
            optimizer: Optimizer,
            gradient_clip_val: float | None = None,
            gradient_clip_algorithm: str | None = None,
        ) -> None:
            """Clip as Lightning does; its own code refuses the fused optimizer under autocast, to bf16 too."""
            clip_grad_norm_(self.parameters(), gradient_clip_val)

        def configure_optimizers(self) -> Any:
            optimizer, schedule = make_optimizer(self.model, settings)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    _checkpoint(module, settings)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            default_root_dir=folder,
            accelerator="cpu" if experiment.device.type == "cpu" else "gpu",
            devices=1 if experiment.device.type == "cpu" else [experiment.device.index],
            precision="bf16-mixed" if settings.precision == "bf16" else "32-true",
            max_steps=settings.num_steps,
            max_epochs=1,
            accumulate_grad_batches=settings.accumulation_steps,
            gradient_clip_val=settings.max_grad_norm,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Training(), loader(experiment, prepared))
    return kept


def _checkpoint(module: nn.Module, settings: RunSettings) -> None:
    if settings.checkpointing == "every_layer":
        checkpoint_layers(module)
