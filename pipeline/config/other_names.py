"""What other tools call Fitproof's settings, and how their configuration files are recognized."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "lr_scheduler": ("learning_rate_schedule",),
    "lr_scheduler_type": ("learning_rate_schedule",),
    "warmup_steps": ("learning_rate_warmup_steps",),
    "num_warmup_steps": ("learning_rate_warmup_steps",),
    "lr_warmup_steps": ("learning_rate_warmup_steps",),
    "warmup_ratio": ("learning_rate_warmup_ratio",),
    "optim": ("optimizer",),
    "epochs": ("num_epochs",),
    "num_train_epochs": ("num_epochs",),
    "max_epochs": ("num_epochs",),
    "max_steps": ("num_steps",),
    "max_train_steps": ("num_steps",),
    "train_steps": ("num_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "gradient_clip_val": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "max_norm": ("max_grad_norm",),
    "batch_size": ("micro_batch_size", "effective_batch_size"),
    "train_batch_size": ("effective_batch_size",),
    "global_batch_size": ("effective_batch_size",),
    "per_device_train_batch_size": ("micro_batch_size",),
    "per_device_batch_size": ("micro_batch_size",),
    "per_gpu_train_batch_size": ("micro_batch_size",),
    "train_micro_batch_size_per_gpu": ("micro_batch_size",),
    "local_batch_size": ("micro_batch_size",),
    "gradient_accumulation_steps": ("accumulation_steps",),
    "gradient_accumulation": ("accumulation_steps",),
    "accumulate_grad_batches": ("accumulation_steps",),
    "num_processes": ("world_size", "gpus"),
    "nproc_per_node": ("world_size", "gpus"),
    "num_gpus": ("world_size", "gpus"),
    "n_gpus": ("world_size", "gpus"),
    "devices": ("world_size", "gpus"),
    "tensor_parallel_size": ("tensor_parallel",),
    "tensor_parallel_degree": ("tensor_parallel",),
    "tp_size": ("tensor_parallel",),
    "tp": ("tensor_parallel",),
    "deepspeed": ("sharding=fsdp",),
    "fsdp": ("sharding=fsdp",),
    "fsdp_version": ("sharding=fsdp",),
    "fsdp_reshard_after_forward": ("reshard_after_forward",),
    "fsdp_offload_params": ("sharded_offloading",),
    "offload_params": ("sharded_offloading",),
    "cpu_offload": ("sharded_offloading",),
    "enable_cpu_offload": ("sharded_offloading",),
    "zero_stage": ("sharding=fsdp",),
    "max_length": ("sequence_length",),
    "max_seq_length": ("sequence_length",),
    "max_seq_len": ("sequence_length",),
    "seq_length": ("sequence_length",),
    "seq_len": ("sequence_length",),
    "sequence_len": ("sequence_length",),
    "cutoff_len": ("sequence_length",),
    "block_size": ("sequence_length",),
    "context_length": ("sequence_length",),
    "packing": ("sequences=packed_documents",),
    "sample_packing": ("sequences=packed_documents",),
    "group_by_length": ("sequences=grouped",),
    "pad_to_sequence_len": ("sequences=fixed_length",),
    "bf16": ("precision=bf16",),
    "fp16": ("precision=fp16",),
    "fp32": ("precision=fp32",),
    "tf32": ("precision=tf32",),
    "mixed_precision": ("precision",),
    "dtype": ("weights", "precision"),
    "torch_dtype": ("weights", "precision"),
    "gradient_checkpointing": ("checkpointing=every_layer",),
    "activation_checkpointing": ("checkpointing=every_layer",),
    "use_gradient_checkpointing": ("checkpointing=every_layer",),
    "attn_implementation": ("attention",),
    "flash_attention": ("attention=flash",),
    "flash_attn": ("attention=flash",),
    "torch_compile": ("compile=layers",),
    "use_liger_kernel": ("loss_kernel=liger",),
    "liger_kernel": ("loss_kernel=liger",),
    "lora": ("adapter=lora",),
    "use_peft": ("adapter=lora",),
    "use_lora": ("adapter=lora",),
    "peft": ("adapter=lora",),
    "finetuning_type": ("adapter",),
    "load_in_4bit": ("adapter=qlora",),
    "quantization_bit": ("adapter=qlora",),
    "lora_r": ("adapter_rank",),
    "lora_rank": ("adapter_rank",),
    "lora_alpha": ("adapter_alpha",),
    "lora_dropout": ("adapter_dropout",),
    "lora_target": ("adapter_targets",),
    "lora_target_modules": ("adapter_targets",),
    "target_modules": ("adapter_targets",),
    "model_name": ("model",),
    "model_name_or_path": ("model",),
    "model_id": ("model",),
    "base_model": ("model",),
    "pretrained_model_name_or_path": ("model",),
    "dataset": ("chat.name", "hub.name"),
    "dataset_name": ("chat.name", "hub.name"),
    "dataset_path": ("chat.path", "text_files.path"),
    "datasets": ("chat.name", "chat.path"),
    "data_path": ("chat.path", "text_files.path"),
    "train_file": ("chat.path", "text_files.path"),
    "output_dir": ("output",),
    "memory": ("budget",),
    "vram": ("budget",),
    "max_memory": ("budget",),
    "card": ("gpu",),
    "gpu": ("device", "budget"),
}
"""Names of transformers, TRL, peft, axolotl, LLaMA-Factory, DeepSpeed, Lightning and Accelerate, with Fitproof's."""
NUM_NAMED = 6
"""Keys of another tool's file that are named with Fitproof's names for them."""


@dataclass(frozen=True)
class Tool:
    """Another tool that has configuration files."""

    name: str
    command: str
    """Trains with the file {file}."""
    keys: tuple[str, ...]
    """Keys of which its files have one, and those of the tools below none."""


TOOLS = (
    Tool("Accelerate", "accelerate launch --config_file {file} train.py", ("compute_environment",)),
    Tool("DeepSpeed", "deepspeed train.py --deepspeed {file}", ("zero_optimization", "train_micro_batch_size_per_gpu")),
    Tool("axolotl", "axolotl train {file}", ("base_model",)),
    Tool("LLaMA-Factory", "llamafactory-cli train {file}", ("stage", "finetuning_type", "cutoff_len", "template")),
    Tool("TRL", "trl sft --config {file}", ("model_name_or_path",)),
    Tool("Trainer", "python train.py", ("per_device_train_batch_size", "gradient_accumulation_steps")),
)
"""The first whose keys a file has is the one that it is for."""


def names_for(name: str) -> tuple[str, ...]:
    """Return Fitproof's settings, some with a value, for what another tool calls so; none if it is not known."""
    return OTHER_NAMES.get(name.rpartition(".")[2].replace("-", "_").lower(), ())


def foreign_configuration(file: Path, values: Mapping[str, Any]) -> str | None:
    """Return that a configuration file is for another tool, and what to do; None if it is not."""
    tool = next((one for one in TOOLS if not values.keys().isdisjoint(one.keys)), None)
    if tool is None:
        return None
    known = [f"{name} is {found[0]}" for name in values if (found := names_for(name))]
    return (
        f"{file} is a configuration of {tool.name}, which Fitproof does not read: fitproof simulate --gpu CARD -- "
        f"{tool.command.format(file=file)} says what it needs"
        + (f"; to write it for Fitproof, {', '.join(known[:NUM_NAMED])}" if known else "")
    )
