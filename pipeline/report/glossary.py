"""The field's terms as this project uses them: each page explains those that stand on it, docs/glossary.md has all."""

import re

GLOSSARY = {
    "accumulation": (
        "The gradients of several forward and backward passes are summed before one optimizer step: "
        "accumulation_steps passes of micro_batch_size sequences."
    ),
    "activations": "Tensors that a forward pass makes and the backward pass needs.",
    "allocated": "Bytes that live tensors hold, as torch's allocator counts them.",
    "baseline": (
        "What a comparison is against: its variant with a star; in a search the configuration that fits with every "
        "technique at its default (plain)."
    ),
    "bound": (
        "How much slower than the best configuration of the space the answer can be. It comes from the time model, "
        "which is fitted to the measured configurations, and from their noise."
    ),
    "budget": (
        "The memory that a training may take: on CUDA a hard cap on what the allocator may reserve, on a CPU a limit "
        "that the measured peak is compared with."
    ),
    "checkpointing": (
        "Activations are not kept but computed again in the backward pass: less memory, more time. "
        "every_2_layers keeps the input of every second layer."
    ),
    "confidence": (
        "The probability with which a stated bound is true according to the time model: of 100 searches with 95 % "
        "confidence it is expected to be false in 5."
    ),
    "device memory, device MiB, of the card": (
        "Bytes of the card as nvidia-smi shows them: reserved, with the CUDA context and what libraries take."
    ),
    "effective batch": (
        "Sequences in one optimizer step: micro-batch x accumulation x processes. It decides what is learned, so a "
        "search keeps it."
    ),
    "gradients": "One tensor for each trained parameter, from the backward pass until the optimizer step.",
    "headroom": "The part of the budget that the peak leaves.",
    "held-out loss": "The loss on sequences that are not trained on, after the last step.",
    "interval": (
        "Where a value lies with a probability of 95 %. If the interval of a change contains zero, the change is not "
        "beyond noise."
    ),
    "micro-batch, micro_batch_size": "Sequences in one forward pass.",
    "noise": "The difference between runs of one configuration, from other load and from process to process.",
    "not predicted": "Neither memory nor work is known before a run: the configuration cannot be simulated.",
    "not tried yet": "May fit and may be faster than the answer: the search ended before.",
    "optimizer state": "What the optimizer keeps for each parameter: of AdamW two tensors of its size.",
    "peak": "The most memory that is held at one moment, over at least two optimizer steps.",
    "precision": "The number format in which matrix products compute (autocast); parameters stay in float32.",
    "reserved": "Bytes that torch's caching allocator has taken of the card: allocated, and blocks that it keeps free.",
    "same training": (
        "The answer and the plain configuration were trained again on the same data, and the losses of their steps "
        "differ by no more than rounding does."
    ),
    "simulated": (
        "Run on a simulated card: PyTorch's own CUDA build, whose kernels compute nothing, on a stand-in for NVIDIA's "
        "libraries. Allocations are the real ones."
    ),
    "temporary": "Tensors that live within one phase: results of operators that nothing keeps.",
    "tokens/s": "Tokens of the training data in a second, without padding.",
}
"""What a term means; several names of one are separated by commas."""


def terms_in(text: str) -> dict[str, str]:
    """Return the terms that stand in a text, with their meaning."""
    words = text.lower()
    return {
        term: meaning
        for term, meaning in GLOSSARY.items()
        if any(re.search(rf"\b{re.escape(name)}", words) for name in term.lower().split(", "))
    }


def glossary() -> str:
    """Return docs/glossary.md."""
    lines = [f"- **{term}**: {meaning}" for term, meaning in GLOSSARY.items()]
    head = "# Glossary\n\nTerms as pages, messages and these documents use them; each page explains those on it."
    return f"{head} Written by\n`python docs/make_reference.py`.\n\n" + "\n".join(lines) + "\n"
