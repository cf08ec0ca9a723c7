"""CPU-only torch, no driver and a hidden GPU are told apart; a device is there or says why not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flashbench import environment
from flashbench.environment import Probe, gpu_status
from flashbench.errors import SpecError, UnavailableError

FINE = Probe(torch_version="2.11.0", torch_cuda="13.0", devices=1, visible=None, driver="580.95", nvml_gpus=1)


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({}, "ok", "torch sees 1 GPU"),
        ({"torch_cuda": None, "devices": 0}, "cpu-only-torch", "built without CUDA"),
        ({"torch_cuda": None, "torch_hip": "6.4.2"}, "rocm-torch", "built for AMD GPUs (ROCm 6.4.2)"),
        ({"devices": 0, "driver": None, "nvml_gpus": None}, "no-driver", "driver"),
        ({"devices": 0, "driver": None, "nvml_gpus": None, "visible": ""}, "no-driver", "driver"),
        ({"devices": 0, "visible": ""}, "hidden", "CUDA_VISIBLE_DEVICES=''"),
        ({"devices": 0, "visible": "7"}, "hidden", "CUDA_VISIBLE_DEVICES='7'"),
        ({"devices": 0, "visible": "-1", "nvml_gpus": None}, "hidden", "CUDA_VISIBLE_DEVICES='-1'"),
        ({"devices": 0, "nvml_gpus": 0}, "no-gpu", "580.95"),
        ({"devices": 0}, "unusable", "CUDA 13.0"),
    ],
)
def test_reasons_for_no_gpu_are_told_apart(changes: dict, kind: str, said: str) -> None:
    status = gpu_status(replace(FINE, **changes))
    assert status.kind == kind
    assert said in status.message


def test_a_cpu_only_torch_beside_a_driver_says_what_to_install() -> None:
    assert "CUDA build" in gpu_status(replace(FINE, torch_cuda=None, devices=0)).hint
    assert not gpu_status(replace(FINE, torch_cuda=None, devices=0, driver=None)).hint


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CPU", "", "cuda:0 "])
def test_what_is_no_device_is_refused(device: str) -> None:
    with pytest.raises(SpecError, match="accepted: 'cpu', 'cuda' or 'cuda:0'"):
        environment.target(device)


def test_the_cpu_is_always_there() -> None:
    target = environment.target("cpu")
    assert (target.device, target.type, target.capability) == ("cpu", "cpu", None)
    assert target.name


def test_without_a_gpu_the_default_is_the_cpu_and_a_gpu_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden = replace(FINE, devices=0, visible="")
    monkeypatch.setattr(environment, "probe", lambda: hidden)
    assert environment.target(None).type == "cpu"
    with pytest.raises(UnavailableError, match="CUDA_VISIBLE_DEVICES") as caught:
        environment.target("cuda:0")
    assert caught.value.hint


def test_collect_is_json_and_names_what_a_row_needs() -> None:
    facts = environment.collect(environment.target("cpu"))
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert set(environment.ROW_FIELDS) <= set(facts)
    assert facts["device_type"] == "cpu"
    assert set(environment.row_fields(facts)) == set(environment.ROW_FIELDS)


def test_the_source_hash_follows_the_kernels_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    kernel = tmp_path / "kernels" / "one.py"
    kernel.write_text("BLOCK = 64\n")
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "environment.py"))
    seen = set()
    for text in ("BLOCK = 64\n", "BLOCK = 128\n"):
        kernel.write_text(text)
        environment.source_hash.cache_clear()
        seen.add(environment.source_hash())
    environment.source_hash.cache_clear()
    assert len(seen) == 2
    assert all(len(value) == 16 for value in seen)


def test_an_installed_copy_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "flashbench" / "environment.py"))
    environment.git_state.cache_clear()
    assert environment.git_state() == {"git_commit": None, "git_dirty": None}
    environment.git_state.cache_clear()


def test_free_memory_of_a_cpu_is_positive() -> None:
    free = environment.free_bytes(environment.target("cpu"))
    assert free is None or free > 2**20


@pytest.mark.gpu
def test_a_gpu_is_described_and_a_missing_one_named() -> None:
    target = environment.target(None)
    assert target.device == "cuda:0"
    assert target.total_bytes is not None
    facts = environment.collect(target)
    assert facts["driver"]
    assert facts["uuid"]
    assert facts["cudnn"].count(".") == 2
    free = environment.free_bytes(target)
    assert free is not None
    assert 0 < free <= target.total_bytes
    with pytest.raises(UnavailableError, match="torch sees"):
        environment.target("cuda:64")


def test_a_child_gets_the_variables_as_they_are_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    environment.for_child().clear()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert environment.for_child(MORE="x")["CUDA_VISIBLE_DEVICES"] == "1"
    assert environment.for_child()["CUDA_VISIBLE_DEVICES"] == "1"
