"""TRL's trainers on a small Llama that is made here: fine_tuning.py full|lora|qlora|liger|dpo|kto|reward|grpo."""

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, PreTrainedTokenizerFast

kind = sys.argv[1]
TEXT = "the quick brown fox jumps over the lazy dog"
COMMON = {
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "bf16": True,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
}


def make_model(folder: Path) -> PreTrainedTokenizerFast:
    """Write a Llama of random weights, and return its tokenizer."""
    numbers = {word: number for number, word in enumerate(["<unk>", *sorted(set(TEXT.split()))])}
    words = Tokenizer(models.WordLevel(numbers, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"unk_token": "<unk>", "eos_token": "dog", "pad_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        bos_token_id=1,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


with tempfile.TemporaryDirectory() as name:
    tokenizer = make_model(Path(name))
    common = {**COMMON, "output_dir": f"{name}/out"}
    if kind == "grpo":
        from trl import GRPOConfig, GRPOTrainer

        GRPOTrainer(
            model=name,
            reward_funcs=lambda completions, **_: [float(len(one)) for one in completions],
            args=GRPOConfig(**common | {"per_device_train_batch_size": 4}, num_generations=4, max_completion_length=32),
            train_dataset=Dataset.from_list([{"prompt": TEXT}] * 32),
        ).train()
    elif kind == "dpo":
        from trl import DPOConfig, DPOTrainer

        DPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(name),
            args=DPOConfig(**common),
            train_dataset=Dataset.from_list([{"prompt": TEXT, "chosen": "jumps over", "rejected": "the dog"}] * 32),
            processing_class=tokenizer,
        ).train()
    elif kind == "kto":
        from trl import KTOConfig, KTOTrainer

        KTOTrainer(
            model=AutoModelForCausalLM.from_pretrained(name),
            args=KTOConfig(**common),
            train_dataset=Dataset.from_list(
                [{"prompt": TEXT, "completion": "jumps over", "label": number % 2 == 0} for number in range(32)]
            ),
            processing_class=tokenizer,
        ).train()
    elif kind == "reward":
        from transformers import AutoModelForSequenceClassification
        from trl import RewardConfig, RewardTrainer

        RewardTrainer(
            model=AutoModelForSequenceClassification.from_pretrained(name, num_labels=1),
            args=RewardConfig(**common),
            train_dataset=Dataset.from_list([{"prompt": TEXT, "chosen": "jumps over", "rejected": "the dog"}] * 32),
            processing_class=tokenizer,
        ).train()
    else:
        from trl import SFTConfig, SFTTrainer

        options = {}
        if kind == "qlora":
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
            )
        adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
        SFTTrainer(
            model=AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map={"": 0}, **options),
            args=SFTConfig(
                **common,
                max_length=512,
                use_liger_kernel=kind == "liger",
                optim="paged_adamw_8bit" if kind == "qlora" else "adamw_torch_fused",
            ),
            train_dataset=Dataset.from_list([{"text": f"{TEXT} " * 100}] * 64),
            processing_class=tokenizer,
            peft_config=None if kind in ("full", "liger") else adapter,
        ).train()
