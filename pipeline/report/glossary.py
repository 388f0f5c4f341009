"""The field's terms as this project uses them: each page explains those that stand on it, docs/glossary.md has all."""

import re

TERMS = """
accumulation: gradients of several forward and backward passes are summed before one optimizer step
activations: tensors that a forward pass makes and the backward pass needs
allocated: bytes that live tensors hold, as torch's allocator counts them
baseline: what a comparison is against; in a search the configuration that fits with every technique at its default
bound: how much slower than the best configuration the answer can be, by the time model and the noise of measurements
budget: the memory that a training may take: on CUDA a cap on what is reserved, on a CPU a limit on the measured peak
checkpointing: activations are computed again in the backward pass: in every_2_layers those of every second layer
confidence: the probability with which a bound is true by the time model: at 95 % it is expected to be false in 5 of 100
device MiB, of the card: bytes of the card as nvidia-smi shows them: reserved, the CUDA context, what libraries take
effective batch: sequences in one optimizer step: micro-batch x accumulation x processes; a search keeps it
gradients: a tensor for each trained parameter, from the backward pass until the optimizer step
headroom: the part of the budget that the peak leaves
held-out loss: the loss on documents that are not trained on, after the last step
interval: where a value lies with a probability of 95 %; a change whose interval contains zero is not beyond noise
micro-batch, micro_batch_size: sequences in one forward pass
noise: the difference between runs of one configuration, from other load and from process to process
not predicted: nothing is known of its memory and time before a run
not tried yet: it may fit and be faster than the answer; the search ended before
optimizer state: what the optimizer keeps for each parameter: of AdamW two tensors of its size
peak: the most memory that is held at one moment, over at least two optimizer steps
plain: the configuration that the answer's losses are compared with: the baseline, or it with a smaller micro-batch
precision: the number format in which matrix products compute (autocast); parameters keep their own type
reserved: bytes that torch's caching allocator has taken of the card: allocated, and blocks that it keeps free
same training: trained again on the same data, answer and plain configuration differ in their losses by rounding alone
simulated: run on a simulated card: PyTorch's own CUDA build on a stand-in for NVIDIA's libraries; nothing is computed
temporary: tensors that live within one phase: results of operators that nothing keeps
tokens/s: tokens of the training data in a second, without padding
"""
"""A term in each line, several names of one separated by commas, and its meaning."""
GLOSSARY: dict[str, str] = dict(line.split(": ", maxsplit=1) for line in TERMS.strip().splitlines())


def terms_in(text: str) -> dict[str, str]:
    """Return the terms that stand in a text, with their meaning."""
    words = text.lower()
    return {
        term: meaning
        for term, meaning in GLOSSARY.items()
        if any(re.search(rf"\b{re.escape(name.lower())}", words) for name in term.split(", "))
    }


def glossary() -> str:
    """Return docs/glossary.md."""
    head = "# Glossary\n\nTerms as pages and documents use them; each page explains those that stand on it. Written by"
    lines = [f"- **{term}**: {meaning}" for term, meaning in GLOSSARY.items()]
    return "\n".join((f"{head}\n`python docs/make_reference.py`.\n", *lines)) + "\n"
