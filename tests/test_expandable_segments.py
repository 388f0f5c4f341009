"""Expandable segments: in the environment of the run's own process, beside what the user's environment sets."""

import os
from pathlib import Path

import pytest
from conftest import tiny
from test_prediction import CPU

from pipeline.memory.allocator_options import options_in
from pipeline.memory.device import find_device, hardware_of
from pipeline.prediction.cards import find_hardware
from pipeline.prediction.predict import predict
from pipeline.runtime.run import execute
from pipeline.techniques.expandable_segments import ExpandableSegments

ON = ExpandableSegments(expandable_segments=True)


@pytest.mark.parametrize(
    ("variable", "given", "expected"),
    [
        ("PYTORCH_ALLOC_CONF", None, "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments : False", "expandable_segments:True"),
        (
            "PYTORCH_ALLOC_CONF",
            "roundup_power2_divisions:[256:1,>:4], garbage_collection_threshold:0.8",
            "roundup_power2_divisions:[256:1,>:4],garbage_collection_threshold:0.8,expandable_segments:True",
        ),
    ],
)
def test_it_is_added_to_what_the_users_environment_sets(
    variable: str, given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(variable, given)
    assert ON.environment() == {variable: expected}
    in_process = options_in({**os.environ, **tiny(expandable_segments=True).environment})
    assert "expandable_segments:True" in in_process.replace(" ", "")
    assert not tiny().environment, "the setting false leaves it to the user"


def test_it_needs_cuda_and_is_tried_unless_the_user_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    t4 = find_hardware("t4")
    assert ExpandableSegments.values_to_try("expandable_segments", CPU) == (False,)
    assert ExpandableSegments.values_to_try("expandable_segments", t4) == (False, True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert ExpandableSegments.values_to_try("expandable_segments", t4) == (False,)
    assert tiny(expandable_segments=True).unsupported(CPU) == (
        "expandable_segments=true configures CUDA's caching allocator, and the device is cpu; "
        "set expandable_segments=false"
    )


@pytest.mark.gpu
def test_a_run_with_it_reserves_as_predicted(tmp_path: Path) -> None:
    card = hardware_of(find_device("cuda"))
    settings = {"device": "cuda", "causal_lm__width": 256, "causal_lm__num_heads": 4, "num_steps": 5, "eval_steps": 0}
    reserved = []
    for value in (False, True):
        experiment = tiny(**settings, expandable_segments=value)
        result = execute(experiment, tmp_path / "log")
        assert result.memory is not None, result.detail
        predicted = predict(experiment.with_random_weights("cpu"), card).peak_reserved_bytes
        assert predicted == pytest.approx(result.memory.peak_reserved_bytes, rel=0.02)
        reserved.append(result.memory.peak_reserved_bytes)
    assert reserved[0] != reserved[1]
