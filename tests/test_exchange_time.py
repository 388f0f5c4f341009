"""What ranks send: counted on a simulated card to the byte, and part of the estimated time."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import tiny
from project import SMALL, Project
from test_plan import table
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.base.errors import InvalidInputError
from pipeline.memory.work import Work
from pipeline.memory.work_counter import WorkCounter
from pipeline.planning.rates import cost_prior, links_of
from pipeline.planning.step_time import estimated
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict, predict_each
from pipeline.prediction.prediction import Prediction
from pipeline.simulation import cards
from pipeline.simulation.links import LINKS, Link, Links, find_link, link_of

H100, RANKS = find_hardware("h100"), 4
BF16, FLOAT32 = 2, 4
SHARE = (RANKS - 1) / RANKS
"""Of what is gathered or scattered, which a rank sends."""


def sent(**settings: object) -> Prediction:
    """Return the prediction of a rank that takes several passes."""
    passes = {"micro_batch_size": 1, "effective_batch_size": 4 * RANKS, "precision": "bf16"}
    return predict(tiny(world_size=RANKS, **passes, **settings), H100)


def test_every_collective_is_counted_to_the_byte() -> None:
    module = tiny().model.build(tiny().settings.model, 512).module
    total = sum(parameter.numel() for parameter in module.parameters())
    layers = sum(parameter.numel() for name, parameter in module.named_parameters() if ".h." in name)
    assert 0 < layers < total
    reduced = f"sent by all_reduce of {RANKS}"
    gathered, scattered = f"sent by all_gather of {RANKS}", f"sent by reduce_scatter of {RANKS}"
    ddp = sent()
    assert ddp.pass_work.sent_bytes == {} and ddp.last_pass_work.sent_bytes == {reduced: 2 * SHARE * FLOAT32 * total}
    sharded = sent(sharding="fsdp")
    assert sharded.pass_work.sent_bytes == {
        gathered: SHARE * BF16 * (total + layers),  # layers are gathered again for their backward pass
        scattered: SHARE * FLOAT32 * total,
    }
    assert sharded.last_pass_work.sent_bytes == {}
    assert set(sharded.update_work.sent_bytes) == {f"{reduced}, waited for"}  # the norm of the gradients
    kept = sent(sharding="fsdp", reshard_after_forward=False, sharded_accumulation=False)
    assert kept.pass_work.sent_bytes == {gathered: SHARE * BF16 * total}
    assert kept.last_pass_work.sent_bytes == {scattered: SHARE * FLOAT32 * total}

    copies = sent(sharding="fsdp", sharding_replicas=2)  # which add up their parts of the gradients after the last pass
    own, among = SHARE / (RANKS - 1) * 2, "of 2"  # half of what is gathered or scattered
    assert copies.pass_work.sent_bytes == {
        f"sent by all_gather {among} among {RANKS}": own * BF16 * (total + layers),
        f"sent by reduce_scatter {among} among {RANKS}": own * FLOAT32 * total,
    }
    assert copies.last_pass_work.sent_bytes == {
        f"sent by all_reduce {among} in steps of 2 among {RANKS}": 2 * own * FLOAT32 * total / 2
    }
    halves = sent(sharding="fsdp", reshard_after_forward=2)
    assert halves.pass_work.sent_bytes[gathered] == SHARE * BF16 * total
    assert halves.pass_work.sent_bytes[f"sent by all_gather {among} among {RANKS}"] == BF16 * layers / 2


def test_what_ranks_of_users_commands_send_is_counted() -> None:
    """Stages are of users' commands, whose ranks are imagined by the same backend."""
    counter, one = WorkCounter("cuda"), torch.zeros(100)

    class Counted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            counter.count(func, args, kwargs or {}, result, {})
            return result

    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    try:
        with Counted():
            dist.send(one, 3)
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 2), dist.P2POp(dist.irecv, one, 0)]):
                work.wait()
            world = dist.group.WORLD
            group = world if torch.__version__ >= (2, 13) else world.group_name
            torch.ops._c10d_functional.all_reduce(one, "sum", group)
    finally:
        dist.destroy_process_group()
    size = one.numel() * FLOAT32
    assert counter.take_phase().sent_bytes == {
        f"sent by send of 2 in steps of 2 among {RANKS}": size,
        f"sent by send of 2 among {RANKS}": size,
        f"sent by all_reduce of {RANKS}, waited for": 2 * SHARE * size,
    }


def test_what_stays_on_the_host_is_copied_both_ways_and_updated_there() -> None:
    module = tiny().model.build(tiny().settings.model, 512).module
    total = sum(parameter.numel() for parameter in module.parameters())
    layers = sum(parameter.numel() for name, parameter in module.named_parameters() if ".h." in name)
    kept, offloaded = (sent(sharding="fsdp", sharded_offloading=is_offloaded) for is_offloaded in (False, True))
    assert offloaded.peak_allocated_bytes < kept.peak_allocated_bytes
    copied = offloaded.pass_work.host_bytes - kept.pass_work.host_bytes
    to_card, from_card = FLOAT32 * (total + layers) / RANKS, FLOAT32 * total / RANKS
    added = 3 / 4 * 3 * from_card  # to the gradients before, in all passes but the first: two are read, one is written
    assert copied == to_card + from_card + added
    assert offloaded.update_work.host_bytes > 7 * FLOAT32 * total / RANKS > kept.update_work.host_bytes
    assert offloaded.update_work.moved_bytes < kept.update_work.moved_bytes / 100
    time, slower = (estimated(one, 4, cost_prior(H100)) for one in (kept, offloaded))
    assert slower.seconds > time.seconds


def test_a_micro_batch_between_two_sends_what_it_sends_by_itself() -> None:
    """Also where the larger one takes a single pass, which scatters all gradients."""
    shared = {"sharding": "fsdp", "sharded_accumulation": False, "world_size": RANKS, "effective_batch_size": 32}
    sizes = [tiny(micro_batch_size=size, **{**shared, "sharded_accumulation": size == 8}) for size in (1, 2, 8)]
    ddp = [tiny(micro_batch_size=size, world_size=RANKS, effective_batch_size=32) for size in (1, 2, 8)]
    found = dict(predict_each([*sizes, *ddp], H100))
    for one in (0, 3):
        low, middle = found[one], found[one + 1]
        assert isinstance(low, Prediction) and isinstance(middle, Prediction)
        assert middle.last_pass_work == low.last_pass_work != Work()
        assert middle.pass_work.sent_bytes == low.pass_work.sent_bytes


def test_what_is_sent_overlaps_with_computing_or_not() -> None:
    """That of the last pass alone can overlap with that pass alone; what is waited for never does."""
    base = sent()
    seconds_of_byte = 1 / (0.8 * 450e9)

    def times(pass_sent: float, last_sent: float, waited: float = 0.0) -> tuple[float, float]:
        works = {
            "pass_work": Work(
                {"bfloat16": 989.4e12 * 0.5}, sent_bytes={"sent by all_gather of 4": pass_sent / seconds_of_byte}
            ),
            "last_pass_work": Work(sent_bytes={"sent by all_gather of 4": last_sent / seconds_of_byte}),
            "update_work": Work(sent_bytes={"sent by all_reduce of 4, waited for": waited / seconds_of_byte}),
        }
        prior = cost_prior(H100)
        time = estimated(Prediction(**{**vars(base), **works}), 4, prior)
        assert time.overlapped_seconds <= time.seconds <= time.serial_seconds
        return time.overlapped_seconds, time.serial_seconds

    assert times(0, 0) == pytest.approx((4, 4))
    assert times(0.5, 0) == pytest.approx((4, 6))
    assert times(0, 3) == pytest.approx((3 + 3, 4 + 3))
    assert times(2, 1, waited=1) == pytest.approx((3 * 2 + 3 + 1, 4 * 3 + 1 + 1))


def test_links_have_names_numbers_of_ports_and_rates() -> None:
    assert find_link("nvlink4") == link_of_card("h100") == LINKS["nvlink4"]
    assert link_of_card("rtx4090").gb_per_s == LINKS["pcie4"].gb_per_s
    assert find_link("8xinfiniband-ndr").gb_per_s == 400
    assert find_link("400Gb/s").gb_per_s == find_link("50 GB/s").gb_per_s == 50
    for wrong in ("nvlink9", "0GB/s", "50", "0xpcie4"):
        with pytest.raises(InvalidInputError, match="link is one of nvlink1, "):
            find_link(wrong)


def test_a_group_of_ranks_on_several_machines_sends_over_their_ports() -> None:
    links = links_of(H100)
    assert links.within == LINKS["nvlink4"] and links.between == find_link("8xinfiniband-ndr")
    slow = Links(LINKS["nvlink4"], find_link("45GB/s"))
    assert slow.slowdown(8, 1, 16) == slow.slowdown(2, 4, 16) == slow.slowdown(3, 1, 6) == 1  # of one machine
    assert slow.slowdown(16, 1, 16) == 10  # of two, alone on the ports
    assert slow.slowdown(2, 8, 16) == 80  # with seven other groups
    assert slow.slowdown(8, 2, 16) == 20  # with one other
    assert slow.slowdown(3, 1, 12) == 10  # the third of four groups is on both machines
    assert slow.slowdown(3, 1, 24) == 20  # the second machine has parts of two
    rack = links_of(find_hardware("gb200"))
    assert (rack.gpus_per_machine, rack.gpus_per_host) == (72, 4) and rack.slowdown(72, 1, 72) == 1
    fast = Links(find_link("10GB/s"), find_link("45GB/s"))
    assert fast.slowdown(16, 1, 16) == 1  # as slow as its slowest part


def link_of_card(name: str) -> Link:
    """Return the link of a card in the table."""
    return link_of(cards.CARDS[name])


def test_a_plan_for_all_gpus_orders_layouts_by_their_time_on_the_link(project: Project) -> None:
    space = '{"micro_batch_size": [1, 2], "sharding": "auto", "reshard_after_forward": "auto"}'
    given = {**SMALL, "model": "gpt2-nano", "effective_batch_size": "16", "space": space, "precision": "bf16"}
    machines = {"link": "0.01GB/s", "gpus_per_machine": "2", "machine_link": "0.005GB/s"}
    done = project.here("plan", {**given, "gpu": "h100", "gpus": "4", **machines})
    assert done.returncode == 0, done.stderr
    words = " ".join(done.stdout.split())
    assert "over 0.01GB/s (0.01 GB/s in one direction" in words and "if nothing does)" in words
    assert "a machine has 2 GPUs (--gpus_per_machine), and all its ports to others are 0.005GB/s (0.005 GB/s)" in words
    assert re.search(
        "once on each machine, with one of them as HOST: torchrun --nnodes 2 .* fitproof main --world_", words
    )
    assert len(done.stdout.splitlines()) <= 60
    rows = table(project, "plan_4_x_nvidia_h100_80gb_hbm3")
    assert len(rows) == 2 * 3 and rows["tokens/s"].is_monotonic_decreasing
    between = rows["s if all overlaps"], rows["seconds per step"], rows["s if nothing does"]
    assert (between[0] <= between[1]).all() and (between[1] < between[2]).all()
    slow = rows.set_index(["micro-batch", "sharding", "reshard_after_forward"])["tokens/s"]
    assert slow[1, "none", True] > slow[1, "fsdp", False] > slow[1, "fsdp", True]  # which gather in each of 4 passes


def test_numbers_of_cards_are_compared_by_speed_of_each_and_by_price(project: Project) -> None:
    given = {**SMALL, "model": "gpt2-nano", "effective_batch_size": "16", "space": '{"micro_batch_size": [1, 2]}'}
    prices = {"gpu": "h100,t4", "gpus": "1,2", "prices": '{"H100": 3, "t4": 0.25}'}
    done = project.here("plan", {**given, **prices})
    assert done.returncode == 0, done.stderr
    cards = table(project, "cards")
    assert [name.partition(" ")[0] for name in cards["card"]] == ["1", "2", "1", "2"]
    assert (cards["tokens/s"] / [1, 2, 1, 2]).tolist() == pytest.approx(cards["tokens/s a GPU"].tolist())
    expected = [3, 6, 0.25, 0.5] / cards["tokens/s"] / 3600 * 1e9
    assert cards["price of 1e9 tokens"].tolist() == pytest.approx(expected.tolist())
    cheapest = cards.loc[cards["price of 1e9 tokens"].idxmin()]
    said = " ".join(done.stdout.split())
    assert f"A billion tokens cost the least on {cheapest['card']}: {cheapest['price of 1e9 tokens']:,.2f}." in said
    assert re.search("run it on 2 x (Tesla T4|NVIDIA H100 80GB HBM3): fitproof main --world_size 2 ", said)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpus": "8", "world_size": "4"}, "all gpus train together, and gpus is 8 and world_size 4"),
        ({"gpus": "8", "gpu": "2xh100"}, "gpus counts cards that train together, and is 8, and gpu is 2 x NVIDIA H100"),
        ({"gpus": "8", "gpu": "cpu"}, "gpus counts cards that train together"),
        ({"gpus": "0"}, "gpus must be a number of cards, or several with commas"),
        ({"gpus": "1,2", "world_size": "2"}, "gpus is 1,2 and world_size 2"),
        ({"prices": '{"h900": 1}'}, "no card is called 'h900'"),
        ({"gpus": "8", "link": "nvlink9"}, "link is one of nvlink1"),
        ({"gpus": "16", "machine_link": "nope"}, "link is one of nvlink1"),
        ({"gpus": "16", "gpus_per_machine": "0"}, "gpus_per_machine must be greater than 0"),
        ({"gpus": "3"}, "does not divide"),
    ],
)
def test_wrong_numbers_and_links_are_refused(settings: dict[str, str], words: str, project: Project) -> None:
    done = project.here(
        "plan", {**SMALL, "model": "gpt2-nano", "effective_batch_size": "16", "gpu": "h100", **settings}
    )
    assert done.returncode == 2 and words in " ".join(done.stderr.split()), done.stderr
