"""A stage's folder: written atomically, bound to what it was made from, so that a rerun skips, continues or refuses.

Every stage folder holds `manifest.json`: the stage, its state (`running` or `done`), the *key* (the resolved settings
and the fingerprints of the inputs: equal keys mean interchangeable artefacts), the versions of the software and, once
done, the stage's result. A folder whose key differs from the wanted one is never reused and never overwritten.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_RECORDED_PACKAGES = ("draftsmith", "torch", "transformers", "accelerate", "deepspeed", "datasets", "safetensors")


def fingerprint(value: object) -> str:
    """A short, stable digest of any JSON-able value (16 hexadecimal digits of SHA-256 over its canonical form)."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def write_atomically(path: Path, content: str | bytes | Callable[[Path], None]) -> None:
    """Write a file so that readers see the old content or the new, never a part, even after a kill or a power cut.

    `content` may also be a function that writes to the temporary path it is given (for libraries that write files).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        sync_to_disk(temporary)
        temporary.chmod(0o644)
        temporary.replace(path)
        sync_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """fsync a file or a folder; a rename is durable only after its folder is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Artefact:
    """One stage folder. `Artefact.open` says whether its content can be reused; `finish` marks it done."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = manifest

    @classmethod
    def open(cls, folder: Path, stage: str, key: Mapping[str, Any]) -> "Artefact":
        """Open or start the folder of `stage` for exactly this `key`.

        Raises ValueError when the folder holds an artefact of another key, naming each setting that differs.
        """
        wanted = json.loads(json.dumps(dict(key), sort_keys=True, default=str))
        path = folder / MANIFEST
        if path.is_file():
            found = _read_manifest(path)
            differences = list(_differences(found.get("key"), wanted))
            if found.get("stage") != stage or differences:
                raise ValueError(
                    f"{folder} holds a {found.get('stage')} artefact of other inputs "
                    f"({'; '.join(differences[:8]) or 'another stage'}). Nothing was changed. "
                    f"Use another output_dir, or delete {folder} to build it anew."
                )
            return cls(folder, found)
        if folder.is_dir() and any(not _is_unborn_manifest(file) for file in folder.iterdir()):
            raise ValueError(
                f"{folder} exists, has no {MANIFEST} and is not empty. Use another output_dir or empty it."
            )
        artefact = cls(
            folder,
            {"stage": stage, "state": "running", "key": wanted, "started": _now(), "versions": software_versions()},
        )
        artefact._write()
        return artefact

    @property
    def is_done(self) -> bool:
        """True when the stage has finished; a `running` artefact is continued."""
        return bool(self.manifest["state"] == "done")

    @property
    def fingerprint(self) -> str:
        """The digest by which downstream stages name this artefact as an input (of its key and its result)."""
        return fingerprint([self.manifest["stage"], self.manifest["key"], self.manifest.get("result")])

    @property
    def result(self) -> dict[str, Any]:
        """What the stage reported when it finished (counts, figures); empty while running."""
        result: dict[str, Any] = self.manifest.get("result", {})
        return result

    def finish(self, result: Mapping[str, Any]) -> None:
        """Mark the stage done. `result` must be reproducible from the key: no times, no machine names."""
        self.manifest |= {"state": "done", "finished": _now(), "result": dict(result)}
        self._write()

    def discard(self) -> None:
        """Remove the folder of a stage that failed before it made anything worth continuing."""
        assert not self.is_done, f"{self.folder} is finished and must not be discarded"
        shutil.rmtree(self.folder)

    def _write(self) -> None:
        write_atomically(self.folder / MANIFEST, json.dumps(self.manifest, indent=1, default=str) + "\n")


def read_artefact(folder: Path, stage: str) -> Artefact:
    """Open a finished stage folder as an input. Raises ValueError when it is missing, unfinished or another stage."""
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} holds no finished {stage} stage: {MANIFEST} is missing. Run that stage first.")
    artefact = Artefact(folder, _read_manifest(path))
    if artefact.manifest.get("stage") != stage or not artefact.is_done:
        raise ValueError(
            f"{folder} holds a {artefact.manifest.get('state')} {artefact.manifest.get('stage')} stage; "
            f"a finished {stage} stage is needed. Run that stage first."
        )
    return artefact


def software_versions() -> dict[str, str]:
    """The versions that shape an artefact, for its manifest."""
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def read_json(path: Path, fix: str) -> Any:
    """A JSON file that a stage wrote. Raises ValueError naming the file and the fix when it is damaged."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path} is not readable JSON ({error}). {fix}") from error


def is_done(folder: Path) -> bool:
    """Whether a stage in `folder` has finished. Raises ValueError when its manifest is damaged."""
    path = folder / MANIFEST
    return path.is_file() and bool(_read_manifest(path)["state"] == "done")


def _is_unborn_manifest(file: Path) -> bool:
    """A kill during the very first write of a stage leaves nothing but this."""
    return file.name.startswith(f".{MANIFEST}.") and file.name.endswith(".tmp")


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest: dict[str, Any] = read_json(path, f"Delete {path.parent} to build it anew.")
    fields = {"stage", "state", "key"}
    is_whole = isinstance(manifest, dict) and fields <= manifest.keys() and isinstance(manifest["key"], dict)
    if not is_whole or (manifest["state"] == "done" and not isinstance(manifest.get("result"), dict)):
        raise ValueError(f"{path} is not a draftsmith manifest. Delete {path.parent} to build it anew.")
    return manifest


def _differences(found: Any, wanted: Any, name: str = "") -> Any:
    """Yield 'field: was X, wanted Y' for every leaf in which two keys differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for field in sorted(found.keys() | wanted.keys()):
            yield from _differences(found.get(field), wanted.get(field), f"{name}.{field}" if name else field)
    elif found != wanted:
        yield f"{name}: was {found!r}, wanted {wanted!r}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
