"""LoRA adapters, identified by what is in their files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from kvplug.digest import tagged_digest

__all__ = ["AdapterIdentities", "AdapterUnreadableError"]

_CONFIG = "adapter_config.json"
#: In vLLM's order: it loads the first that is there.
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt", "adapter_model.tensors")
#: Loaded beside the weights by some versions.
_EXTRAS = ("new_embeddings.safetensors", "new_embeddings.bin")
#: Files of an adapter in a format of its own that don't decide what it computes.
_DOCUMENTATION = (".md", ".txt", ".png", ".jpg", ".svg")
_CHUNK = 1 << 20

#: What a file's content is remembered by: device, inode, size in bytes, modification and change time in nanoseconds.
_Stamp = tuple[int, int, int, int, int]


class AdapterUnreadableError(Exception):
    """An adapter's content isn't known, so KV made under it can't be told from other KV."""


class AdapterIdentities:
    """Content digests of the LoRA adapters that an engine uses.

    Files are read in full, once per change: an adapter of 100 MB costs some tenths of a second when it's first seen,
    and a few `stat` calls per request from then on. Equal files give equal digests, whatever the adapter's name and
    path are.

    Not thread-safe: it belongs to the scheduler's thread.
    """

    def __init__(self) -> None:
        """Start with no adapters."""
        self._files: dict[Path, tuple[_Stamp, bytes]] = {}
        # The digest under which an adapter was first used. vLLM keeps what it loaded, whatever happens to the files.
        self._loaded: dict[tuple[int, str], bytes] = {}

    def identity(self, lora_request: Any) -> bytes:
        """Return the digest of an adapter's content, 32 bytes.

        Args:
            lora_request: vLLM's `LoRARequest`.

        Raises:
            AdapterUnreadableError: The files can't be read, or have changed since the adapter was loaded: vLLM may be
                using either content then, until the adapter is loaded again.

        """
        name = lora_request.lora_name
        directory = _directory(lora_request)
        try:
            content = self._content(directory)
        except OSError as error:
            raise AdapterUnreadableError(f"The LoRA adapter {name!r} can't be read: {error}.") from error
        # Says how the same tensors are to be understood (mixture-of-experts layers).
        form = b"3d" if getattr(lora_request, "is_3d_lora_weight", False) else None
        digest = tagged_digest("kvplug.lora", content, form)
        loaded = (lora_request.lora_int_id, str(directory))
        if getattr(lora_request, "load_inplace", False):
            self._loaded[loaded] = digest
        elif self._loaded.setdefault(loaded, digest) != digest:
            raise AdapterUnreadableError(
                f"The files of the LoRA adapter {name!r} have changed since it was loaded; load it again, best from a "
                "new path."
            )
        return digest

    def _content(self, directory: Path) -> bytes:
        files = _files_that_matter(directory)
        parts: list[bytes] = []
        for file in files:
            parts += [file.relative_to(directory).as_posix().encode(), self._file(file)]
        return tagged_digest("kvplug.lora-files", *parts)

    def _file(self, path: Path) -> bytes:
        stamp = _stamp(path.stat())
        known = self._files.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        hasher = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
            if _stamp(os.fstat(file.fileno())) != stamp:
                raise OSError(f"{path.name} changed while it was read")
        self._files[path] = (stamp, hasher.digest())
        return hasher.digest()


def _stamp(status: os.stat_result) -> _Stamp:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _directory(lora_request: Any) -> Path:
    """Find an adapter's directory as vLLM does, without the network."""
    # Adapters in Tensorizer's format had their own place, up to vLLM 0.19.
    tensorizer = getattr(lora_request, "tensorizer_config_dict", None) or {}
    location = str(tensorizer.get("tensorizer_dir") or lora_request.lora_path)
    path = Path(location).expanduser()
    if path.is_absolute() or path.exists():
        return path.absolute()
    # Not a path, so the name of a repository, which vLLM has downloaded.
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(location, local_files_only=True))
    except (ImportError, OSError, ValueError) as error:
        raise AdapterUnreadableError(
            f"The LoRA adapter {lora_request.lora_name!r} ({location}) is neither a directory nor in the Hub cache."
        ) from error


def _files_that_matter(directory: Path) -> list[Path]:
    """List the files that decide what an adapter computes, in a stable order."""
    weights = next((directory / name for name in _WEIGHTS if (directory / name).is_file()), None)
    config = directory / _CONFIG
    if weights is not None and config.is_file():
        return [config, weights, *(directory / name for name in _EXTRAS if (directory / name).is_file())]
    found = sorted(
        path
        for path in directory.rglob("*")
        if path.is_file() and path.suffix not in _DOCUMENTATION and not _is_hidden(path.relative_to(directory))
    )
    if all(path == config for path in found):
        raise FileNotFoundError(f"{directory.name} has no adapter weights")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
