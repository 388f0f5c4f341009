"""torchtitan: a Python file with its trainer's configuration; what it says of torchtitan was read in release 0.3."""

from typing import Any, ClassVar

from pipeline.base.errors import InvalidInputError
from pipeline.export.facts import NOT_MEASURED, Facts
from pipeline.export.target import Target, render

MODELS = {
    "meta-llama/Llama-3.1-8B": ("llama3", "8B"),
    "meta-llama/Llama-3.1-70B": ("llama3", "70B"),
    "meta-llama/Llama-3.1-405B": ("llama3", "405B"),
    "Qwen/Qwen3-0.6B": ("qwen3", "0.6B"),
    "Qwen/Qwen3-1.7B": ("qwen3", "1.7B"),
    "Qwen/Qwen3-4B": ("qwen3", "4B"),
    "Qwen/Qwen3-8B": ("qwen3", "8B"),
    "Qwen/Qwen3-14B": ("qwen3", "14B"),
    "Qwen/Qwen3-32B": ("qwen3", "32B"),
}
"""torchtitan's module and shape of a model, by its name on the hub; its Llama 3.2 has other positions than that."""
COMMAND = "torchrun --nproc_per_node {} -m torchtitan.train --module torchtitan_config --config measured"
KINDS = {"training": "TrainingConfig", "parallelism": "ParallelismConfig", "compile": "CompileConfig"}
"""Class of a section of torchtitan's configuration; a technique names a key in it as `section.key`."""
NUMS_CHUNKS = (1, 2, 4, 8)
"""Numbers of the loss's chunks, of which torchtitan's own is the last; they have to divide the sequence."""
LARGE_NORM = 1e9
"""torchtitan clips always: to this norm, no gradient is."""


class Torchtitan(Target):
    """torchtitan's Trainer, for the models of which it has the shape."""

    purpose: ClassVar[str] = (
        f"For torchtitan, in the folder of torchtitan_config.py: `{COMMAND.format('GPUS')}`, with as many GPUs as it "
        "says."
    )
    takes_code: ClassVar[bool] = False

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the file, for a model that torchtitan has as it is."""
        if facts.published not in MODELS or facts.changes:
            return {}
        module, shape = MODELS[facts.published]
        text = render(
            "torchtitan_config.py.jinja",
            facts,
            notes=self.other_notes(facts),
            command=COMMAND.format(_num_gpus(facts)),
            module=module,
            shape=shape,
            sections=_sections(facts),
            num_chunks=max(count for count in NUMS_CHUNKS if facts.settings.sequence_length % count == 0),
            kinds=KINDS,
        )
        return {"torchtitan_config.py": text}

    def differences(self, facts: Facts) -> list[str]:
        """Return what the file cannot express, and what torchtitan does differently."""
        notes = []
        if facts.settings.precision not in ("fp32", "bf16"):
            notes.append(f"{NOT_MEASURED}torchtitan has no precision={facts.settings.precision}, and float32 is set.")
        if facts.settings.precision == "bf16" and facts.weights == "float32":
            notes.append("Its FSDP computes all in bfloat16, norms too, which autocast left in float32.")
        if facts.settings.checkpointing not in ("none", "every_layer"):
            notes.append(
                f"torchtitan checkpoints all layers here, where checkpointing={facts.settings.checkpointing} was "
                "measured: the training is the same, its memory and time are not."
            )
        what = "tokenizer and weights" if facts.pretrained else "tokenizer"
        return [
            *notes,
            f"{NOT_MEASURED}it reads its own data set c4, cuts documents to fill a sequence, lets them not attend to "
            "one another, and trains all tokens. dataloader names another data set that torchtitan has.",
            f"hf_assets_path names the folder of the model's {what}.",
            "Its model is torchtitan's own code, with FlexAttention, so its memory is not what was measured: "
            f"`fitproof simulate --gpu CARD --world_size {_num_gpus(facts)} -- {COMMAND.format(1)}` says what it is.",
        ]


def _num_gpus(facts: Facts) -> int:
    """Return the number of processes, those of `tensor_parallel` included, one for each GPU."""
    parts: int = facts.arguments.get("parallelism.tensor_parallel_degree", 1)
    return facts.world_size * parts


def _sections(facts: Facts) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": facts.settings.micro_batch_size,
            "global_batch_size": facts.effective_batch_size,
            "seq_len": facts.settings.sequence_length,
            "steps": facts.settings.num_steps,
            "max_norm": facts.settings.max_grad_norm or LARGE_NORM,
            "dtype": facts.weights,
            "mixed_precision_param": "bfloat16"
            if facts.settings.precision == "bf16" or facts.weights == "bfloat16"
            else "float32",
            "disable_cuda_graphs": True,
        },
        "parallelism": {"data_parallel_replicate_degree": facts.world_size, "data_parallel_shard_degree": 1},
        "compile": {"enable": False},
    }
    for name, value in facts.arguments.items():
        section, _, key = name.partition(".")
        if section not in sections:
            raise InvalidInputError(
                f"a technique's arguments for torchtitan are named section.key, of {', '.join(sections)}, and one is "
                f"{name!r}; correct its export()"
            )
        sections[section][key] = value
    return sections
