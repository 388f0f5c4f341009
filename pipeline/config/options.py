"""The settings as types of keyword arguments, for editors and type checkers; a test compares them with the models."""

from pathlib import Path
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """Settings of a run; those of a model family or a corpus are a dictionary: causal_lm={"num_layers": 2}."""

    model: str
    task: (
        Literal[
            "causal_lm",
            "contrastive",
            "ctc",
            "dpo",
            "image_classification",
            "image_text",
            "masked_lm",
            "reward",
            "seq2seq",
            "sequence_classification",
            "speech_recognition",
            "token_classification",
        ]
        | None
    )
    corpus: str
    sequences: Literal["packed", "packed_documents", "fixed_length", "padded", "grouped"]
    sequence_length: int
    vocabulary_size: int
    device: str
    seed: int
    num_steps: int
    num_epochs: float | None
    timing_warmup_steps: int
    learning_rate: float
    learning_rate_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: int
    learning_rate_warmup_steps: int
    learning_rate_warmup_ratio: float | None
    learning_rate_schedule: Literal["constant", "linear", "cosine"]
    weight_decay: float
    max_grad_norm: float | None
    eval_steps: int
    gradient_underflow: bool
    dataset_size: int
    budget: str | None
    time_limit: float | None
    output: str | Path
    micro_batch_size: int | None
    accumulation_steps: int | None
    effective_batch_size: int | None
    world_size: int
    activation_offloading: bool
    offloading_min_mib: float
    adapter: Literal["none", "lora", "qlora"]
    adapter_rank: int
    adapter_alpha: int
    adapter_dropout: float
    adapter_targets: str
    adapter_weights: Literal["float32", "bfloat16"]
    qlora_weights: Literal["nf4", "int8"]
    qlora_double_quantization: bool
    qlora_float32_rest: bool
    attention: Literal["sdpa", "eager", "flash"]
    checkpointing: str
    compile: Literal["none", "layers"]
    expandable_segments: bool
    gelu: Literal["model", "fused"]
    loss_kernel: Literal["full", "chunked", "fused", "liger"]
    loss_chunk_tokens: int | None
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "sgd", "muon"]
    optimizer_implementation: Literal["fused", "foreach", "loop"]
    adamw_8bit_embeddings: Literal["float32", "8bit"]
    adafactor_beta2_decay: float
    adafactor_clipping: float
    sgd_momentum: float
    muon_momentum: float
    muon_scaling: Literal["match_rms_adamw", "original"]
    optimizer_in_backward: bool
    precision: Literal["fp32", "tf32", "fp16", "bf16"]
    initial_loss_scale: float
    reference: Literal["frozen", "none"]
    sharding: Literal["none", "fsdp"]
    sharding_replicas: int
    reshard_after_forward: int | bool
    sharded_accumulation: bool
    sharded_offloading: bool
    tensor_parallel: int
    weights: Literal["float32", "bfloat16", "bfloat16_master"]
    causal_lm: dict[str, Any]
    contrastive: dict[str, Any]
    ctc: dict[str, Any]
    dpo: dict[str, Any]
    encoder_stack: dict[str, Any]
    image_classification: dict[str, Any]
    image_text: dict[str, Any]
    masked_lm: dict[str, Any]
    reward: dict[str, Any]
    seq2seq: dict[str, Any]
    sequence_classification: dict[str, Any]
    speech_recognition: dict[str, Any]
    token_classification: dict[str, Any]
    user_model: dict[str, Any]
    chat: dict[str, Any]
    hub: dict[str, Any]
    python_docs: dict[str, Any]
    quick_fox: dict[str, Any]
    random_vectors: dict[str, Any]
    text_files: dict[str, Any]
    user_corpus: dict[str, Any]


class PlanOptions(RunOptions, total=False):
    """Settings of `plan`."""

    space: dict[str, Any]
    mathematics: Literal["exact", "rounding", "different"]
    config: str | Path | None
    gpu: str
    gpus: int | str | None
    prices: dict[str, float]
    link: str | None
    machine_link: str | None
    gpus_per_machine: int | None
    other_processes: str | None
    install: bool
    all: bool
    effective_batch_sizes: list[int]


class _SearchedOptions(RunOptions, total=False):
    """Settings of `search` and `finetune`."""

    space: dict[str, Any]
    mathematics: Literal["exact", "rounding", "different"]
    config: str | Path | None
    num_trials: int
    search_time_limit: float | None
    sampler: Literal["predictive", "tpe", "gp", "random", "brute", "nsga2"]
    gap: float
    fit_confidence: float
    precision_percent: float
    verify_steps: int
    verify_varying_steps: int
    objectives: Literal["throughput", "pareto"]
    workers: int | None
    executor: Literal["local", "ray"]
    ray_address: str | None
    worker_timeout: int
    storage: str
    study: str


class SearchOptions(_SearchedOptions, total=False):
    """Settings of `search`."""

    command: str | None
    patch: str | None
    env: str | None
    gpu: str | None
    install: bool


class FinetuneOptions(_SearchedOptions, total=False):
    """Settings of `finetune`."""

    kind: str
    longest: bool
    install: bool


class ProfileOptions(RunOptions, total=False):
    """Settings of `profile`."""

    config: str | Path


class CompareOptions(TypedDict, total=False):
    """Settings of `compare`."""

    runs: str | None
    experiment: str | None
    filter: str | None
    baseline: str | None
    output: str | Path


class ExportOptions(TypedDict, total=False):
    """Settings of `export`."""

    config: str | Path
    output: str | Path
    gpu: str | None


class SimulateOptions(TypedDict, total=False):
    """Settings of `simulate`."""

    gpus: int
    world_size: int
    rank: int
    ranks: Literal["one", "all"]
    smallest: bool
    step_time: bool
    budget: str | None
    other_processes: str | None
    values: Literal["auto", "on", "off"]
    steps: str
    time_limit: float | None
    install: bool
