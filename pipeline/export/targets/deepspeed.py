"""DeepSpeed: its JSON configuration, and the call that makes an engine with the measured optimizer and schedule."""

import json
from typing import Any, ClassVar

from pipeline.export.facts import DEFAULT_LOSS_SCALE, Facts
from pipeline.export.target import Target, lengths_note, processes_note, render, uneven_note


class DeepSpeed(Target):
    """deepspeed.initialize."""

    purpose: ClassVar[str] = (
        "For DeepSpeed, with ZeRO for sharding=fsdp alone: `make_engine(model)` of deepspeed_setup.py reads "
        "deepspeed.json."
    )

    def files(self, facts: Facts) -> dict[str, str]:
        """Return the configuration, with what it cannot express under `notes`, and the Python file."""
        content = {"notes": self.notes(facts), **_configuration(facts)}
        return {
            "deepspeed.json": json.dumps(content, indent=2) + "\n",
            "deepspeed_setup.py": render("deepspeed_setup.py.jinja", facts, notes=self.differences(facts)),
        }

    def differences(self, facts: Facts) -> list[str]:
        """Return what the configuration has no key for, and what DeepSpeed does differently."""
        command = f"deepspeed --num_gpus {facts.world_size} your_script.py"
        notes = processes_note(facts, command) + lengths_note(facts)
        if facts.has_warmup or facts.decays:
            notes.append(
                "DeepSpeed's own schedulers are one step later than the measured schedule: deepspeed_setup.py sets the "
                "measured one, and without it the rate is constant."
            )
        if facts.checkpointed:
            notes.append("deepspeed.json has no key for the layers to checkpoint: deepspeed_setup.py checkpoints them.")
        if facts.in_python:
            notes.append(f"deepspeed.json has no key for {', '.join(facts.in_python)}: deepspeed_setup.py has it.")
        if facts.settings.precision == "tf32":
            notes.append("deepspeed.json has no key for tf32: deepspeed_setup.py enables it.")
        if facts.autocast_dtype:
            notes.append("torch_autocast keeps float32 weights, as measured; DeepSpeed's bf16 and fp16 do not.")
        if facts.scales_loss and facts.settings.initial_loss_scale != DEFAULT_LOSS_SCALE:
            measured = f"{facts.settings.initial_loss_scale:g} was measured"
            notes.append(f"Under torch_autocast the first loss scale is {DEFAULT_LOSS_SCALE:g}, and {measured}.")
        return notes + uneven_note(facts, "pass engine.backward")


def _configuration(facts: Facts) -> dict[str, Any]:
    has_autocast = facts.autocast_dtype and "bf16" not in facts.arguments
    autocast = {"torch_autocast": {"enabled": True, "dtype": facts.autocast_dtype}} if has_autocast else {}
    optimizer = {
        "lr": facts.learning_rate,
        "weight_decay": facts.settings.weight_decay,
        "torch_adam": True,
        "fused": True,
    }
    return {
        "train_batch_size": facts.effective_batch_size,
        "train_micro_batch_size_per_gpu": facts.settings.micro_batch_size,
        "gradient_accumulation_steps": facts.accumulation_steps,
        "gradient_clipping": facts.settings.max_grad_norm or 0.0,
        "optimizer": {"type": "AdamW", "params": optimizer},
        **autocast,
        "zero_optimization": {"stage": 0},
        **facts.arguments,
    }
