"""Scripts that train with the exported files in each framework, and print the loss of each optimizer step."""

import gc
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader


def windows(script: Any) -> list[list[dict[str, torch.Tensor]]]:
    """Return the micro-batches of each optimizer step, in the order of train.py."""
    tensors = dict(
        zip(("input_ids", "labels", "position_ids"), script.read_sequences(Path(script.TOKENS)), strict=False)
    )
    ids_NT = tensors["input_ids"]
    result = []
    for step in range(script.NUM_STEPS):
        numbers = range(step * script.EFFECTIVE_BATCH_SIZE, (step + 1) * script.EFFECTIVE_BATCH_SIZE)
        rows = [script.order(n // len(ids_NT), len(ids_NT))[n % len(ids_NT)] for n in numbers]
        cuts = torch.tensor(rows).split(script.MICRO_BATCH_SIZE)
        result.append([{name: tensor[cut] for name, tensor in tensors.items()} for cut in cuts])
    return result


def build(script: Any) -> Any:
    """Return the model with the weights of train.py."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(script.SEED)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**script.MODEL)).train()


def accelerate(script: Any) -> None:
    """Train with accelerate_setup.py, each process on its own micro-batches."""
    import accelerate_setup as setup

    accelerator = setup.make_accelerator()
    model = build(script)
    if hasattr(setup, "prepare_model"):
        setup.prepare_model(model)
    model, optimizer = accelerator.prepare(model, setup.make_optimizer(model))
    schedule = setup.make_schedule(optimizer)
    for window in windows(script):
        own = window[accelerator.process_index :: accelerator.num_processes]
        loss = setup.optimizer_step(accelerator, model, optimizer, own).item()
        if accelerator.is_main_process:
            emit(loss)
        schedule.step()
    accelerator.free_memory(model, optimizer, schedule)


def hugging_face(script: Any) -> None:
    """Train with make_trainer, on the sequences in the order of train.py."""
    import training_arguments as setup

    setup.arguments.logging_steps, setup.arguments.save_strategy = 1, "no"
    setup.arguments.disable_tqdm = True
    whole = [
        {name: batch[name][row] for name in batch}
        for w in windows(script)
        for batch in w
        for row in range(len(batch["labels"]))
    ]
    if hasattr(setup, "pad_to_longest"):
        whole = [{name: part[: last_target(row["labels"]) + 1] for name, part in row.items()} for row in whole]
    trainer = setup.make_trainer(build(script), whole, callbacks=[loss_printer()])
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(whole)
    trainer.train()


def trl(script: Any) -> None:
    """Train with make_trainer, which reads the token ids of train.py itself."""
    import trl_sft as setup

    setup.arguments.save_strategy, setup.arguments.disable_tqdm = "no", True
    setup.make_trainer(script.TOKENS, callbacks=[loss_printer()]).train()


def loss_printer() -> Any:
    """Return a callback of transformers' trainers."""
    from transformers import TrainerCallback

    class LossPrinter(TrainerCallback):  # type: ignore[misc]
        def on_log(self, arguments: Any, state: Any, control: Any, logs: dict[str, float], **more: Any) -> None:
            if "loss" in logs:
                emit(logs["loss"])

    return LossPrinter()


def last_target(labels_T: torch.Tensor) -> int:
    """Return the index of the last label that is no padding."""
    return int((labels_T != -100).nonzero().max())


def lightning(script: Any) -> None:
    """Train with make_trainer and configure_optimizers."""
    import lightning_trainer as setup
    from lightning.pytorch import LightningModule

    class Training(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = build(script), []
            if hasattr(setup, "prepare_model"):
                setup.prepare_model(self.model)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return setup.configure_optimizers(self.model)

    module = Training()
    batches = [batch for window in windows(script) for batch in window]
    trainer = setup.make_trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(module, DataLoader(batches, batch_size=None))
    emit_means(module.losses, script.ACCUMULATION_STEPS)


def deepspeed(script: Any) -> None:
    """Train with make_engine."""
    import deepspeed_setup as setup

    engine = setup.make_engine(build(script))
    losses = []
    for batch in (batch for window in windows(script) for batch in window):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    emit_means(losses, script.ACCUMULATION_STEPS)


def emit(loss: float) -> None:
    """Print a loss on a line of its own."""
    print(f"\nloss {loss:.7f}", flush=True)


def emit_means(losses: list[float], size: int) -> None:
    """Print the mean loss of each optimizer step, which is exact if its micro-batches have equal numbers of targets."""
    for start in range(0, len(losses), size):
        emit(sum(losses[start : start + size]) / size)


if __name__ == "__main__":
    framework, folder = sys.argv[1:]
    sys.path.insert(0, folder)
    import train as script  # that of the folder

    globals()[framework](script)
    gc.collect()  # what still uses the process group: its threads would abort the end of this process now and then
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
