"""What computes, and in which precision, is decided from the devices of the run and not from the driver's own."""

import ast
from pathlib import Path

import pytest
import torch

import r1_cli
from r1_cli import hardware as hardware_module
from r1_cli.hardware import Hardware, find_hardware, free_memory, peak_flops

CPU, GPU = Hardware("cpu"), Hardware("cuda", ("0",))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H20", 148e12), ("NVIDIA GB200", 2.5e15), ("NVIDIA B200", 2.25e15),
     ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12), ("NVIDIA A10G", 70e12), ("cpu", None), ("", None)],
)  # fmt: skip
def test_a_device_is_known_by_its_longest_name(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


@pytest.mark.parametrize(
    ("hardware", "kept", "asked", "expected"),
    [(CPU, "fp32", "bf16", torch.float32), (CPU, "bf16", "bf16", torch.bfloat16), (GPU, "fp32", "bf16", torch.bfloat16),
     (GPU, "fp32", "fp32", torch.float32), (GPU, "bf16", "fp32", torch.bfloat16)],
)  # fmt: skip
def test_matrix_products_are_as_fine_as_weights_and_device_allow(
    hardware: Hardware, kept: str, asked: str, expected: torch.dtype
) -> None:
    assert hardware.computing_dtype(kept, asked) is expected


def test_processors_sample_in_float32() -> None:
    assert CPU.engine_dtype("bf16") is torch.float32
    assert GPU.engine_dtype("bf16") is torch.bfloat16


def test_the_gpus_are_those_that_the_run_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert find_hardware() == Hardware("cuda", ("0", "1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7")
    assert find_hardware() == Hardware("cuda", ("5", "7"))


def test_memory_is_free_as_far_as_the_container_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(hardware_module, "CONTAINER_MEMORY", ((limit, used),))
    whole = free_memory()
    assert whole > 2**20
    limit.write_text("max\n")
    used.write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 500\nactive_file 300\ninactive_file 100\n")
    assert free_memory() > 2**20
    limit.write_text("1000\n")
    assert free_memory() == 500
    limit.write_text("100\n")
    assert free_memory() == 0


def test_no_other_room_asks_torch_for_a_gpu() -> None:
    """A driver may have none where the ranks have. Streams and their events are of a device that is given."""
    rooms = Path(r1_cli.__file__).parent.rglob("*.py")
    asking = {
        path.name
        for path in rooms
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("torch.cuda.")
        and node.attr not in ("Event", "Stream", "current_stream", "stream")
    }
    assert asking == {"hardware.py"}
