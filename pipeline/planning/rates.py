"""What devices do in a second: of a card by the table of cards, and of a CPU by a measurement.

FLOP/s of matrix products are those of NVIDIA's data sheets and architecture papers, dense (a data sheet's number "with
sparsity" is twice as high) and summed in float32, which GeForce cards do at half the rate of sums in float16. Memory
bandwidth is from the same sources; the host's is that of the card's lanes of PCIe, one direction, and that of other
cards what links.csv says.
"""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from pipeline.base.contracts import Hardware
from pipeline.memory.work import Work
from pipeline.planning.step_time import ATTENTIONS, CALLS, FORMATS, KINDS, SENT, CostPrior, StepTime, time_of
from pipeline.prediction.cards import card_like, model_of
from pipeline.simulation import cards
from pipeline.simulation.cards import Card
from pipeline.simulation.links import Link, Links, link_between, link_of

TERA, GIGA = 1e12, 1e9
LAUNCH_SECONDS = 10e-6
"""Seconds in which a host launches one operator, with its share of Python and autograd.

It depends on the host and not on the card: 5 to 25 microseconds for a product on the host of an H100
(jiahuanglin.xyz, "From PyTorch op to kernel launch"), 13 on that of a T4 in a notebook (fitted, benchmarks/step_time).
"""
PYTHON_CALL_LAUNCHES = 2.0
"""Cost of an operator's call into Python, in launches: 1.6 to 3.0 on CPUs, 4.0 beside a T4 (benchmarks/step_time)."""
MEASURED_SECONDS = 0.1
"""Time for which each kind of work is repeated on a CPU."""
PRODUCT_SIZE, COPY_BYTES = 384, 2**25
"""Rows and columns of the products, and bytes of the copies that are measured."""
ATTENTION_HEADS, ATTENTION_LENGTH, ATTENTION_WIDTH = 8, 128, 64
"""Heads, tokens and width of a head of the attention that is measured."""
NUM_LAYERS, OPERATORS_PER_LAYER = 100, 8
"""Tiny layers that are measured for the launch of an operator, which includes its share of Python and autograd.

A layer is a product with bias, a norm and GELU: three operators, and five in the backward pass.
"""
WITH_FLOAT8 = (8, 9)
"""The first capability with products of 8 bits, twice as fast as of 16 (data sheets of H100, L40S and B200)."""


Rates = Mapping[str, float]
"""What a device does in a second at most, by the kinds of work of step_time: FLOPs, bytes and calls."""


def _rates(
    *, float32: float, tf32: float, half: float, float8: float, attention: float, half_attention: float, **others: float
) -> Rates:
    """Return the rates by kind of work; `others` are those of what is no FLOP."""
    products = float32, tf32, half, half, float8
    attentions = attention, attention, half_attention, half_attention, half_attention
    return {**dict(zip((*FORMATS, *ATTENTIONS), (*products, *attentions), strict=True)), **others}


def _of_link(link: Link) -> Rates:
    return dict.fromkeys(SENT, link.gb_per_s * GIGA)


def _of_host(launch_seconds: float) -> Rates:
    return dict(zip(CALLS, (1 / launch_seconds, 1 / (PYTHON_CALL_LAUNCHES * launch_seconds)), strict=True))


def _of_card(card: Card) -> Rates:
    float32, half = card.float32_tflops * TERA, card.half_tflops * TERA
    return _rates(
        float32=float32,
        tf32=card.tf32_tflops * TERA,
        half=half,
        float8=half * (2 if card.capability >= WITH_FLOAT8 else 1),
        attention=float32,
        half_attention=half,
        moved_bytes=card.memory_gb_per_s * GIGA,
        host_bytes=card.host_gb_per_s * GIGA,
        **_of_link(link_of(card)),
        **_of_host(LAUNCH_SECONDS),
    )


RATES = {name: _of_card(card) for name, card in cards.CARDS.items()}
"""By the card's name in CARDS."""


EFFICIENCIES = {"cuda": 0.5, "cpu": 1.0}
"""Expected share of a rate that training reaches, by kind of device: a CPU's rates are measured.

On a T4 it is 0.62 of the FLOP/s in float32, 0.39 in float16, and 0.53 of the memory bandwidth (benchmarks/step_time).
"""
DEVIATIONS = {"cuda": 0.35, "cpu": 0.5}
"""Standard deviations of the logarithms of these shares: that of the T4 is within one of them."""
LINK_EFFICIENCY, LINK_DEVIATION = 0.8, 0.35
"""Expected share of a link's rate that NCCL reaches, and the standard deviation of its logarithm.

0.82 of NVLink 4 by NCCL's authors (nccl-tests issue 212), 0.69 of NVLink 3 (issue 178), 0.91 of four ports of
InfiniBand HDR (issue 100). A sum that NVLink's switches compute (SHARP) takes less time than a ring (issue 272).
"""
SIMILAR_DEVIATION = 0.7
"""The same for a card that is not in the table: cards of one capability differ by a factor of 2 per multiprocessor."""
CALL_DEVIATION = 0.7
"""The same for the costs of calls on the host."""
RESIDUAL = 0.1
"""Standard deviation of a step's time with the best costs, as a fraction (benchmarks/step_time: the T4)."""


def rates_of(hardware: Hardware) -> Rates:
    """Return what a device does in a second: of the table, or measured on a CPU.

    A card that is not in the table is taken for the one in it that is most similar, in proportion to the
    multiprocessors.
    """
    if hardware.kind != "cuda":
        return measured_rates()
    card = card_like(hardware)
    assert hardware.num_multiprocessors is not None  # it is a card
    ratio = hardware.num_multiprocessors / card.num_multiprocessors
    beside = ("host_bytes", *SENT, *CALLS)
    return {kind: rate if kind in beside else ratio * rate for kind, rate in RATES[card.gpu].items()}


def note_on_rates(hardware: Hardware) -> str | None:
    """Return what estimated times on a device are based on; None for a card of the table."""
    if hardware.kind != "cuda":
        return "Times are estimated from a short measurement of this machine's CPU."
    similar = card_like(hardware).name
    if similar == model_of(hardware):
        return None
    return f"Times are estimated from the data sheet of {similar}, in proportion to the multiprocessors."


def links_of(
    hardware: Hardware,
    within: Link | None = None,
    between: Link | None = None,
    gpus_per_machine: int | None = None,
) -> Links:
    """Return what connects several cards of a model, where it is not given: what the tables have for such a card."""
    card = card_like(hardware)
    own = link_of(card)
    num_gpus = gpus_per_machine or own.gpus
    return Links(
        within=within or own,
        between=between or link_between(card, num_gpus),
        gpus_per_machine=num_gpus,
        gpus_per_host=gpus_per_machine or own.gpus // own.hosts,
    )


def note_on_links(links: Links, world_size: int) -> str:
    """Return between what the estimated times of so many ranks lie, and by what links."""
    machines = ""
    if world_size > links.gpus_per_machine:
        between = links.between
        ports = f"{between.name} ({between.gb_per_s:g} GB/s)" if between else "assumed to be as fast as within it"
        machines = (
            f"; a machine has {links.gpus_per_machine} GPUs (--gpus_per_machine), and all its ports to others are "
            f"{ports} (--machine_link)"
        )
    return (
        f"world_size: what ranks send goes over {links.within.name} ({links.within.gb_per_s:g} GB/s in one direction; "
        f"--link takes another){machines}; 80 % of the time that overlapping can save is expected to be saved"
    )


def cost_prior(hardware: Hardware, links: Links | None = None) -> CostPrior:
    """Return what is known about the costs on a device, with ranks on links, before anything is measured there.

    Without links all ranks are in one machine, connected as such cards are.
    """
    is_known = hardware.kind != "cuda" or card_like(hardware).name == model_of(hardware)
    of_work = EFFICIENCIES[hardware.kind], DEVIATIONS[hardware.kind] if is_known else SIMILAR_DEVIATION
    of_others = dict.fromkeys(SENT, (LINK_EFFICIENCY, LINK_DEVIATION)) | dict.fromkeys(CALLS, (1.0, CALL_DEVIATION))
    efficiencies_K, deviations_K = np.array([of_others.get(kind, of_work) for kind in KINDS]).T
    return CostPrior(
        log_costs_K=np.log(rate_costs(hardware, links.within if links else None) / efficiencies_K),
        deviations_K=deviations_K,
        residual=RESIDUAL,
        is_queued=hardware.kind == "cuda",
        links=links,
    )


def step_time_on(card: Hardware, passes: Work | None, update: Work | None) -> StepTime | None:
    """Return the estimated time of an optimizer step on a card, or on several as such are linked.

    It is None if the work of the step is not known.
    """
    if passes is None or update is None:
        return None
    return time_of([(1, passes), (1, update)], cost_prior(card, links_of(card)))


def rate_costs(hardware: Hardware, link: Link | None = None) -> list[float]:
    """Return the costs on a device that reaches its rates, by the kinds of step_time, in seconds."""
    rates = {**rates_of(hardware), **(_of_link(link) if link else {})}
    return [1 / rates[kind] for kind in KINDS]


@lru_cache
def measured_rates() -> Rates:
    """Return what this machine's CPU does in a second, each from the fastest of some repetitions."""
    left, source = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE), torch.ones(COPY_BYTES // 4)
    copy, narrow = torch.empty_like(source), left.bfloat16()
    with torch.random.fork_rng(devices=[]):  # the initial weights draw from the caller's generator
        layers = nn.Sequential(
            *(module for _ in range(NUM_LAYERS) for module in (nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()))
        )
    inputs = torch.ones(4, 4)

    def train() -> None:
        layers.zero_grad()
        layers(inputs).sum().backward()

    heads = torch.ones(1, ATTENTION_HEADS, ATTENTION_LENGTH, ATTENTION_WIDTH)
    narrow_heads = heads.bfloat16()
    attention_flops = 4.0 * ATTENTION_HEADS * ATTENTION_LENGTH**2 * ATTENTION_WIDTH  # two products

    def attend(heads: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(heads, heads, heads, is_causal=True)

    flops = 2.0 * PRODUCT_SIZE**3
    float32 = flops / _fastest(lambda: left @ left)
    half = flops / _fastest(lambda: narrow @ narrow)
    copied_bytes = COPY_BYTES / _fastest(lambda: copy.copy_(source))
    return _rates(
        float32=float32,
        tf32=float32,
        half=half,
        float8=half,
        attention=attention_flops / _fastest(lambda: attend(heads)),
        half_attention=attention_flops / _fastest(lambda: attend(narrow_heads)),
        moved_bytes=2 * copied_bytes,  # it reads as many as it writes
        host_bytes=2 * copied_bytes,
        **dict.fromkeys(SENT, copied_bytes),
        **_of_host(_fastest(train) / (NUM_LAYERS * OPERATORS_PER_LAYER)),
    )


def _fastest(function: Callable[[], object]) -> float:
    """Return the seconds of the fastest of several calls."""
    function()
    seconds: list[float] = []
    end = time.perf_counter() + MEASURED_SECONDS
    while not seconds or time.perf_counter() < end:
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
