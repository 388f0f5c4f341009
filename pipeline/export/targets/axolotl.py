"""axolotl: its YAML file."""

from typing import Any, ClassVar

from pipeline.config.given import yaml_text
from pipeline.data._support.chat_template import ANSWERS
from pipeline.data._support.tokenizing import HELD_OUT_EVERY
from pipeline.export.facts import NOT_MEASURED, Facts
from pipeline.export.target import Target, processes_note, render
from pipeline.export.trainer_arguments import epochs_note, trainer_schedule

LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
"""What axolotl turns on beside adapters, unless they are set."""


class Axolotl(Target):
    """axolotl's configuration; what it says of axolotl was read in its version 0.19."""

    purpose: ClassVar[str] = "For axolotl: `axolotl train axolotl.yaml`."
    takes_code: ClassVar[bool] = False

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the file, for a model that transformers builds from a configuration."""
        if facts.configuration is None:
            return {}
        keys = yaml_text({**_settings(facts), "datasets": [_dataset(facts)]})
        return {"axolotl.yaml": render("axolotl.yaml.jinja", facts, notes=self.other_notes(facts), keys=keys)}

    def differences(self, facts: Facts) -> list[str]:
        """Return what the file has no key for, and what axolotl does differently."""
        visible = f"axolotl train axolotl.yaml where {facts.world_size} GPUs are visible"
        notes = [
            *processes_note(facts, visible),
            *_model_notes(facts),
            *_precision_notes(facts),
            *_data_notes(facts),
            *_checkpointing_notes(facts),
            *_optimizer_notes(facts),
            "axolotl sets PYTORCH_ALLOC_CONF=expandable_segments:True, which changes the memory that is reserved, "
            "unless the variable is set: set PYTORCH_ALLOC_CONF=expandable_segments:"
            f"{'expandable_segments:True' in ''.join(facts.environment.values())} as measured.",
        ]
        return sorted(notes, key=lambda note: not note.startswith(NOT_MEASURED))


def _settings(facts: Facts) -> dict[str, Any]:
    """Return all keys but the data's."""
    is_bf16 = facts.settings.precision == "bf16" or facts.weights == "bfloat16"
    return {
        "base_model": facts.published or facts.model,
        **({} if facts.pretrained else {"reinit_weights": True}),
        **({"overrides_of_model_config": facts.changes} if facts.changes else {}),
        "output_dir": "axolotl_output",
        **_lora(facts),
        "sequence_len": facts.settings.sequence_length,
        "excess_length_strategy": "truncate",
        "sample_packing": not facts.is_padded,
        "pad_to_sequence_len": not facts.lengths_vary,
        "val_set_size": 1 / HELD_OUT_EVERY,
        "micro_batch_size": facts.settings.micro_batch_size,
        "gradient_accumulation_steps": facts.accumulation_steps,
        "max_steps": facts.settings.num_steps,
        **({} if facts.settings.num_epochs is None else {"num_epochs": facts.settings.num_epochs}),
        "bf16": is_bf16,
        "fp16": facts.settings.precision == "fp16",
        "tf32": facts.settings.precision == "tf32",
        "attn_implementation": "sdpa",
        **_checkpointing(facts),
        "optimizer": "adamw_torch_fused",
        "learning_rate": facts.learning_rate,
        **{name.removesuffix("_type"): value for name, value in trainer_schedule(facts).items()},
        "weight_decay": facts.settings.weight_decay,
        "max_grad_norm": facts.settings.max_grad_norm or 0.0,
        "seed": facts.settings.seed,
        **({"eot_tokens": [end]} if facts.source and (end := facts.source.end_of_answer) else {}),
        "logging_steps": 1,
        **facts.arguments,
    }


def _lora(facts: Facts) -> dict[str, Any]:
    if facts.lora is None:
        return {}
    adapter = facts.lora.adapter
    return {
        "adapter": "qlora" if facts.lora.is_quantized and adapter.num_bits == 4 else "lora",
        **({f"load_in_{adapter.num_bits}bit": True} if facts.lora.is_quantized else {}),
        **({} if adapter.qlora_double_quantization else {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}),
        "lora_r": adapter.adapter_rank,
        "lora_alpha": adapter.adapter_alpha,
        "lora_dropout": adapter.adapter_dropout,
        "lora_target_modules": list(facts.lora.targets),
        "lora_fan_in_fan_out": facts.lora.is_transposed,
        "peft_autocast_adapter_dtype": adapter.adapter_weights == "float32",
        **dict.fromkeys(LORA_KERNELS, False),
    }


def _checkpointing(facts: Facts) -> dict[str, Any]:
    """Return the keys of checkpointing, which is of all layers or of none, and for all in one way."""
    if not facts.checkpointed:
        return {"gradient_checkpointing": False}
    keys = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    if set(facts.policies) == {"attention_saved"}:
        return {**keys, "selective_checkpointing": {"save": ["attention"], "save_sliding_window": True}}
    return {**keys, "activation_offloading": "hidden_states"} if set(facts.policies) == {"offloaded"} else keys


def _checkpointing_notes(facts: Facts) -> list[str]:
    policy = facts.settings.checkpointing
    if policy in ("none", "every_layer", "attention_saved"):
        return []
    if policy == "offloaded":
        return ["axolotl's own code copies layer inputs to the host: the training is the same, its time may differ."]
    return [
        f"axolotl checkpoints all layers or none: all here, where checkpointing={policy} was measured; the training "
        "is the same, its memory and time are not."
    ]


def _model_notes(facts: Facts) -> list[str]:
    if facts.published is None:
        return [
            f"{facts.model} is a shape that nobody has published: as base_model, name the folder of a model with its "
            "tokenizer."
        ]
    notes = []
    if not facts.pretrained:
        notes.append("The measured run began with random weights; without reinit_weights axolotl loads published ones.")
    if facts.tokenizer is None:
        notes.append(
            f"{NOT_MEASURED}its tokens are of the tokenizer of {facts.published}, and those measured of one that "
            "Fitproof trained on the corpus; memory and time depend on the number of tokens alone."
        )
    return notes


def _precision_notes(facts: Facts) -> list[str]:
    notes, precision = [], facts.settings.precision
    if facts.weights == "float32" and facts.autocast_dtype:
        notes.append(
            f"{NOT_MEASURED}with {precision}: true axolotl loads the weights in {facts.autocast_dtype}, and "
            "float32 was measured; its losses, memory and time are not those measured."
        )
    if facts.weights == "bfloat16" and precision != "bf16":
        notes.append(
            f"{NOT_MEASURED}beside weights in bfloat16 axolotl computes under autocast, and precision="
            f"{precision} was measured; its losses differ by rounding, its memory and time are others too."
        )
    if facts.weights == "bfloat16" and facts.lora is None:
        notes.append("Without adapters axolotl converts norms, embeddings and head to float32: it needs more memory.")
    if facts.scales_loss and facts.lora is None:
        notes.append("Full training with fp16: true ends with an error, as float16 gradients cannot be unscaled.")
    if facts.lora and facts.lora.adapter.adapter_weights == "bfloat16" and facts.weights == "float32":
        notes.append(f"{NOT_MEASURED}its adapters have the type of the weights, and bfloat16 was measured.")
    if facts.lora and not facts.lora.adapter.qlora_float32_rest:
        notes.append(f"{NOT_MEASURED}axolotl converts norms, embeddings and head to float32, which were in bfloat16.")
    if precision == "tf32":
        notes.append("tf32: true needs a GPU of compute capability 8.0 (Ampere) or newer.")
    return notes


def _optimizer_notes(facts: Facts) -> list[str]:
    notes = []
    if facts.settings.weight_decay and facts.lora is None:
        notes.append("axolotl does not apply weight decay to biases and norms; measured it was on every parameter.")
    if facts.settings.num_epochs is not None:
        notes.append(epochs_note(facts, "num_epochs"))
    if facts.settings.learning_rate_warmup_steps and facts.decays:
        notes.append("Its warm-up is one step later than measured.")
    if facts.settings.learning_rate_warmup_steps == 2 and facts.settings.learning_rate_schedule == "constant":
        notes.append("axolotl makes a warm-up of one step one of two: its learning rate is lower in the second step.")
    if facts.lora and facts.checkpointed:
        notes.append("Beside adapters it lets the embeddings' output require gradients, in slightly more memory.")
    return notes


def _dataset(facts: Facts) -> dict[str, Any]:
    source = facts.source
    if source is None:
        return {"path": "documents.jsonl", "ds_type": "json", "type": "completion", "field": "text"}
    own = {"path": source.path, **source.more}
    if source.file_format:
        own["ds_type"] = source.file_format
    if not source.is_chat:
        return {**own, "type": "completion", "field": source.text_field}
    return {
        **own,
        "type": "chat_template",
        "chat_template": "tokenizer_default",
        "field_messages": "messages",
        "roles_to_train": [ANSWERS],
        "train_on_eos": "turn",
    }


def _data_notes(facts: Facts) -> list[str]:
    notes = []
    if facts.source is None:
        notes.append(
            'axolotl cannot read the measured corpus: name a file with a document as {"text": ...} in each line.'
        )
    elif facts.source.is_chat:
        if not facts.source.is_plain:
            notes.append(
                f"{NOT_MEASURED}it reads rows of messages alone, and rows of the corpus have another shape, tools, or "
                "marks of what is not trained, which Fitproof has read: write them as messages, or name their fields "
                "with field_messages, message_property_mappings, field_tools and message_field_training."
            )
        notes.append(
            "It reads the field messages: rows of prompt and completion have to be written so. It trains every answer "
            "with the token that ends its turn, but not what the chat template writes before its words, such as empty "
            "thoughts, which was trained in the measured run."
        )
    else:
        notes.append("It adds the tokenizer's own tokens to each document, and cuts it every sequence_len tokens.")
    if facts.packs_documents:
        notes.append(
            "sample_packing fills sequences with whole documents that do not attend to one another, as measured, but "
            "with others together than measured, and puts the sequences of a micro-batch into one."
        )
    if facts.settings.sequences == "packed":
        notes.append(
            f"{NOT_MEASURED}sample_packing fills a sequence with whole documents that do not attend to one another, "
            "and one after another, cut every sequence_len tokens and attending to what is before, was measured."
        )
    if facts.settings.sequences == "grouped":
        notes.append(
            "It pads to the longest sequence of a micro-batch, and does not sort the sequences of an optimizer step by "
            "length: there is more padding than measured."
        )
    notes.append(
        f"Its order of the sequences is another, and val_set_size holds out other rows, as many: one of "
        f"{HELD_OUT_EVERY}."
    )
    return notes
