"""`r1 check --device`: right numbers pass, wrong ones and dead processes are found; the CPU stands for a GPU."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from device_faults import check_halved_sums, die, fail, not_a_number, right

from r1_cli.hardware import Hardware
from r1_cli.main import main
from r1_cli.plan.check import device, device_kernels, device_steps
from r1_cli.plan.check.device import BOUNDS, DeviceCheck, list_checks, run_device_checks
from r1_cli.plan.check.device_runs import check_run

CPU = torch.device("cpu")
CHECKS = {f"{check.name}, {check.dtype}": check for check in list_checks(runs=False)}


@pytest.mark.parametrize("name", [name for name, check in CHECKS.items() if check.ranks == 1])
def test_a_device_that_computes_rightly_passes(name: str) -> None:
    check = CHECKS[name]
    assert check.run() < BOUNDS[check.dtype] / 4
    key = check.avoid.partition("=")[0]
    assert not key or key.startswith("worker.")


def test_ranks_that_sum_and_gather_rightly_pass_and_others_are_found() -> None:
    check = next(check for check in CHECKS.values() if check.ranks == 2)
    for compute, level in ((check.compute, "note"), (check_halved_sums, "error")):
        (finding,) = run_device_checks([replace(check, compute=compute)])
        assert finding.level == level, finding
    assert finding.fix.startswith("set NCCL_P2P_DISABLE=1")
    assert "collectives of 2 ranks, float32" in finding.message


def test_several_gpus_are_checked_together_and_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*gpus: str) -> dict[str, int]:
        monkeypatch.setattr(device, "find_hardware", lambda: Hardware("cuda", gpus))
        return {check.name: check.ranks for check in list_checks()}

    alone, four = named("0"), named("0", "1", "2", "3")
    assert set(alone.values()) == {1}
    assert [name for name in four if name not in alone] == [
        "collectives of 4 ranks", "`r1 train`, two steps with embedded on 2 GPUs"
    ]  # fmt: skip
    assert four["collectives of 4 ranks"] == 4


def worst(name: str) -> float:
    return CHECKS[f"{name}, torch.float32"].run()


def test_a_kernel_without_its_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_kernels.packed_attention

    def wrong(*args: Any, sliding_window: int | None, **kwargs: Any) -> Any:
        return right(*args, sliding_window=sliding_window and sliding_window + 1, **kwargs)

    monkeypatch.setattr(device_kernels, "packed_attention", wrong)
    assert worst("attention, heads of 128, window") > BOUNDS[torch.float32]
    assert worst("attention, heads of 128, causal") < BOUNDS[torch.float32]


def test_a_wrong_gradient_of_a_right_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = device_kernels.vision_attention

    def wrong(module: Any, query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        return right(module, query, key.detach() + 0.99 * (key - key.detach()), *rest, **kwargs)

    monkeypatch.setattr(device_kernels, "vision_attention", wrong)
    assert worst("vision tower's attention, heads of 80") > BOUNDS[torch.float32]


def test_bits_that_change_in_host_memory_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(device_steps.OffloadableTensors):
        def load(self) -> None:
            self._slabs[0][4096:8192] = 0
            super().load()

    monkeypatch.setattr(device_steps, "OffloadableTensors", Wrong)
    assert worst("states to host memory and back") > BOUNDS[torch.float32]


def test_each_check_has_its_own_process_and_a_fault_names_the_setting_that_avoids_it() -> None:
    made = DeviceCheck("a kernel", die, torch.float32, "worker.x=false")
    checks = [replace(made, compute=one) for one in (die, fail, not_a_number, right)]
    dead, raised, nan, fine = run_device_checks(checks)
    assert [one.level for one in (dead, raised, nan, fine)] == ["error", "error", "error", "note"]
    assert dead.fix == raised.fix == nan.fix == "set worker.x=false"
    assert raised.message == "a kernel, float32: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert "exit code 3" in dead.message
    assert "differs by inf" in nan.message


def test_the_command_takes_no_configuration_with_it() -> None:
    found = CliRunner().invoke(main, ["check", "--device", "run.yaml"])
    assert found.exit_code == 2
    assert "--device checks the machine" in found.output


def test_the_command_reports_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    first = list_checks(runs=False)[:2]
    monkeypatch.setattr(device, "list_checks", lambda runs: first)
    found = CliRunner().invoke(main, ["check", "--device", "--json"])
    assert found.exit_code == 0, found.output
    findings = json.loads(found.stdout)["findings"]
    assert [one["message"].partition(", bfloat16")[0] for one in findings] == [check.name for check in first]
    assert "2 checks of this machine's CPU" in found.stderr


@pytest.mark.slow
def test_a_short_run_of_two_ranks_gives_equal_probabilities_by_engines_and_learner() -> None:
    shares, ones = check_run(CPU, torch.bfloat16, "embedded", 2)
    assert shares.tolist() == pytest.approx(ones.tolist(), abs=1e-4)


@pytest.mark.vllm
@pytest.mark.slow
def test_a_short_run_with_vllm_gives_equal_probabilities() -> None:
    pytest.importorskip("vllm")
    shares, ones = check_run(CPU, torch.bfloat16, "vllm")
    assert shares.tolist() == pytest.approx(ones.tolist(), abs=1e-4)
