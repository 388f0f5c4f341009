"""What other tools call Fitproof's settings, and how their configuration files are recognized."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES: Mapping[tuple[str, ...], str] = {
    ("learning_rate",): "lr",
    ("learning_rate_schedule",): "lr_scheduler lr_scheduler_type",
    ("learning_rate_warmup_steps",): "warmup_steps num_warmup_steps lr_warmup_steps",
    ("learning_rate_warmup_ratio",): "warmup_ratio",
    ("optimizer",): "optim",
    ("num_epochs",): "epochs num_train_epochs max_epochs",
    ("num_steps",): "max_steps max_train_steps train_steps",
    ("max_grad_norm",): "gradient_clipping gradient_clip_val grad_clip max_norm",
    ("micro_batch_size", "effective_batch_size"): "batch_size",
    ("effective_batch_size",): "train_batch_size global_batch_size",
    ("micro_batch_size",): (
        "per_device_train_batch_size per_device_batch_size per_gpu_train_batch_size "
        "train_micro_batch_size_per_gpu local_batch_size"
    ),
    ("accumulation_steps",): "gradient_accumulation_steps gradient_accumulation accumulate_grad_batches",
    ("world_size", "gpus"): "num_processes nproc_per_node num_gpus n_gpus devices",
    ("tensor_parallel",): "tensor_parallel_size tensor_parallel_degree tp_size tp",
    ("sharding=fsdp",): "deepspeed fsdp fsdp_version zero_stage",
    ("reshard_after_forward",): "fsdp_reshard_after_forward",
    ("sharded_offloading",): "fsdp_offload_params offload_params cpu_offload enable_cpu_offload",
    ("sequence_length",): (
        "max_length max_seq_length max_seq_len seq_length seq_len sequence_len cutoff_len block_size context_length"
    ),
    ("sequences=packed_documents",): "packing sample_packing",
    ("sequences=grouped",): "group_by_length",
    ("sequences=fixed_length",): "pad_to_sequence_len",
    ("precision=bf16",): "bf16",
    ("precision=fp16",): "fp16",
    ("precision=fp32",): "fp32",
    ("precision=tf32",): "tf32",
    ("precision",): "mixed_precision",
    ("weights", "precision"): "dtype torch_dtype",
    ("checkpointing=every_layer",): "gradient_checkpointing activation_checkpointing use_gradient_checkpointing",
    ("attention",): "attn_implementation",
    ("attention=flash",): "flash_attention flash_attn",
    ("compile=layers",): "torch_compile",
    ("loss_kernel=liger",): "use_liger_kernel liger_kernel",
    ("adapter=lora",): "lora use_peft use_lora peft",
    ("adapter",): "finetuning_type",
    ("adapter=qlora",): "load_in_4bit quantization_bit",
    ("adapter_rank",): "lora_r lora_rank",
    ("adapter_alpha",): "lora_alpha",
    ("adapter_dropout",): "lora_dropout",
    ("adapter_targets",): "lora_target lora_target_modules target_modules",
    ("model",): "model_name model_name_or_path model_id base_model pretrained_model_name_or_path",
    ("chat.name", "hub.name"): "dataset dataset_name",
    ("chat.path", "text_files.path"): "dataset_path data_path train_file",
    ("chat.name", "chat.path"): "datasets",
    ("output",): "output_dir",
    ("budget",): "memory vram max_memory",
    ("gpu",): "card",
    ("device", "budget"): "gpu",
}
"""Fitproof's settings, some with a value, and what they are called by transformers, TRL, peft, axolotl, LLaMA-Factory,
DeepSpeed, Lightning and Accelerate."""
OTHER_NAMES = {other: settings for settings, others in _NAMES.items() for other in others.split()}
NUM_NAMED = 6
"""Keys of another tool's file that are named with Fitproof's names for them."""


TOOLS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Accelerate": ("accelerate launch --config_file {file} train.py", ("compute_environment",)),
    "DeepSpeed": ("deepspeed train.py --deepspeed {file}", ("zero_optimization", "train_micro_batch_size_per_gpu")),
    "axolotl": ("axolotl train {file}", ("base_model",)),
    "LLaMA-Factory": ("llamafactory-cli train {file}", ("stage", "finetuning_type", "cutoff_len", "template")),
    "TRL": ("trl sft --config {file}", ("model_name_or_path",)),
    "Trainer": ("python train.py", ("per_device_train_batch_size", "gradient_accumulation_steps")),
}
"""Other tools that have configuration files, each with what trains with one, and keys of which its files have one.

The first whose keys a file has is the one that it is for.
"""


def names_for(name: str) -> tuple[str, ...]:
    """Return Fitproof's settings, some with a value, for what another tool calls so; none if it is not known."""
    return OTHER_NAMES.get(name.rpartition(".")[2].replace("-", "_").lower(), ())


def foreign_configuration(file: Path, values: Mapping[str, Any]) -> str | None:
    """Return that a configuration file is for another tool, and what to do; None if it is not."""
    tools = [(name, command) for name, (command, keys) in TOOLS.items() if not values.keys().isdisjoint(keys)]
    if not tools:
        return None
    tool, command = tools[0]
    known = [f"{name} is {found[0]}" for name in values if (found := names_for(name))]
    return (
        f"{file} is a configuration of {tool}, which Fitproof does not read: fitproof simulate --gpu CARD -- "
        f"{command.format(file=file)} says what it needs"
        + (f"; to write it for Fitproof, {', '.join(known[:NUM_NAMED])}" if known else "")
    )
