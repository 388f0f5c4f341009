"""The loss of a language model without all logits in memory, as code of exported files."""

from pipeline.base.technique import source_of
from pipeline.techniques._support import chunked_loss

LIGER = "from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy\n"
KERNELS = {
    "chunked": """chunked_cross_entropy(
        hidden_NC, head.weight, head.bias, targets_N, {chunk}, soft_cap, factor=factor
    )""",
    "fused": """F.linear_cross_entropy(
        hidden_NC,
        head.weight,
        targets_N,
        linear_bias=head.bias,
        reduction="sum",
        options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size={chunk}),
    )""",
    "liger": """liger_fused_linear_cross_entropy(
        hidden_NC,
        head.weight,
        targets_N,
        bias=head.bias,
        reduction="sum",
        softcap=soft_cap,
        accum_dtype=torch.float32,
    )""",
}
"""The summed loss of each kernel, as a Python expression."""
FUNCTIONS = """from functools import wraps

{liger}import torch.nn.functional as F
from transformers.modeling_outputs import CausalLMOutput


{chunked}def summed_loss_without_logits(model, ids_BT, labels_BT, factor=1.0, forward=None, **more):
    \"\"\"Return the cross-entropy summed over the targets; the head of the model only hands its input over.

    `factor` is what the backward pass multiplies it by: 16 bits hold the gradients of that.
    \"\"\"
    head, received = model.get_output_embeddings(), []
    before = vars(head).get("forward")
    head.forward = lambda hidden_BTC: received.append(hidden_BTC) or hidden_BTC[..., :0]
    try:
        (forward or model)(**{{**more, "input_ids": ids_BT, "use_cache": False}})
    finally:
        del head.forward
        if before is not None:
            head.forward = before
    hidden_NC, soft_cap = received.pop().flatten(0, 1), getattr(model.config, "final_logit_softcapping", None)
    targets_N = F.pad(labels_BT, (0, 1), value=-100)[:, 1:].flatten()
    return {loss}


def compute_loss_without_logits(model):
    \"\"\"Let the model return this loss, over the number of targets, where it is called with labels.\"\"\"
    plain = model.forward

    @wraps(plain)
    def forward(input_ids=None, *, labels=None, num_items_in_batch=None, **more):
        if labels is None:
            return plain(input_ids=input_ids, **more)
        count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return CausalLMOutput(loss=summed_loss_without_logits(model, input_ids, labels, forward=plain, **more) / count)

    model.forward = forward
"""


def exported_loss(kernel: str, chunk: str) -> str:
    """Return the imports and functions of the loss, which need nothing of this package.

    `chunk` is an expression of the tokens of a chunk, in which `head` is the head.
    """
    return FUNCTIONS.format(
        liger=LIGER if kernel == "liger" else "",
        chunked=f"{source_of(chunked_loss)}\n\n\n" if kernel == "chunked" else "",
        loss=KERNELS[kernel].format(chunk=chunk),
    )
