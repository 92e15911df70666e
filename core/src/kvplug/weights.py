"""The identity of a model's weights: their content, where it can be looked at, whatever the path is."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplug.digest import tagged_digest
from kvplug.errors import ConfigError
from kvplug.log import get_logger

__all__ = ["content_digest", "describe_weights"]

logger = get_logger(__name__)

_SAFETENSORS = ".safetensors"
#: Formats that are sampled without being understood.
_OPAQUE = (".bin", ".pt", ".gguf", ".tensors")
#: Left over from training; vLLM doesn't load them either.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.bin")
_WINDOW = 4096
#: A checkpoint with more tensors (experts are tensors of their own in most) is sampled in one place per tensor.
_MANY_TENSORS = 10_000
_OPAQUE_WINDOWS = 1024
_TENSORS_PER_TASK = 256
_MAX_HEADER = 100 << 20
_THREADS = 8
_COMMIT_LENGTH = 40

#: Path, then name, size in bytes, modification time in nanoseconds and inode of each file.
_Stamp = tuple[str, tuple[tuple[str, int, int, int], ...]]
_digests: dict[_Stamp, bytes] = {}


def describe_weights(model_config: Any, load_config: Any) -> dict[str, Any]:
    """Say which weights a model has, in a form that is equal wherever the weights are.

    Args:
        model_config: vLLM's `ModelConfig`, of the model or of a draft model.
        load_config: vLLM's `LoadConfig`.

    Returns:
        A dict for JSON, with one of these under `kind`: `dummy` (random weights, with their seed); `commit` (a
        snapshot in the local Hub cache: the commit); `content` (files: a digest of samples of every tensor);
        `name` (neither can be seen from here: name and revision, with a warning).

    Raises:
        ConfigError: There is a directory or file, but no weights in it that could be told from others.

    """
    if load_config.load_format == "dummy":
        return {"kind": "dummy", "seed": model_config.seed}
    # Weights in object storage: the URI is kept here, and `model` is a directory with no weights in it.
    uri = getattr(model_config, "model_weights", "")
    source = str(uri or model_config.model)
    path = Path(source).expanduser()
    if not uri and path.exists():
        if (commit := _commit_of_snapshot(path)) is not None:
            return {"kind": "commit", "commit": commit}
        digest = content_digest(path)
        if digest is None:
            raise ConfigError(
                f"{source} has no weights in a format that kvplug can identify; set model_id to a name of your own "
                "for these weights."
            )
        return {"kind": "content", "digest": digest.hex()}
    revision = getattr(model_config, "revision", None)
    # The file of a GGUF repository can be chosen behind a colon.
    repository, _, variant = source.partition(":") if not uri else (source, "", "")
    commit = None if uri else _cached_commit(repository, revision, getattr(load_config, "download_dir", None))
    if commit is not None:
        return {"kind": "commit", "commit": commit} | ({"variant": variant} if variant else {})
    logger.warning(
        "The weights of %s aren't on this machine, so their name and revision (%s) stand for them in block keys. "
        "Set model_id, and change it with the weights, if they can change under that name.",
        source,
        revision,
    )
    return {"kind": "name", "name": source, "revision": None if revision is None else str(revision)}


def content_digest(path: Path) -> bytes | None:
    """Return a digest of the weights in a directory or file, or None if there are none.

    Of a safetensors file, every tensor's name, dtype, shape and samples of its bytes are looked at: all of a small one,
    and 4 KiB each from the start, the middle and the end of a larger one (from the middle only, where there are more
    than 10,000 tensors). How tensors are spread over files doesn't matter. Other formats are sampled at 1,024 evenly
    spaced places. So a fine-tune isn't its base model, at a cost of milliseconds to seconds; a change of a few numbers
    between the samples is missed.

    The digest is remembered per process, until a file changes.

    Args:
        path: A local model directory, or a single file of weights.

    Raises:
        ConfigError: A file is no safetensors file though it's called one.
        OSError: A file can't be read.

    """
    files = _weight_files(path)
    if not files:
        return None
    stamp = (str(path.absolute()), tuple(_file_stamp(file) for file in files))
    if stamp not in _digests:
        tensors = [tensor for file in files if file.suffix == _SAFETENSORS for tensor in _tensors_of(file)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="kvplug-weights") as pool:
            chunks = [tensors[i : i + _TENSORS_PER_TASK] for i in range(0, len(tensors), _TENSORS_PER_TASK)]
            windows = 1 if len(tensors) > _MANY_TENSORS else 3
            records = [r for chunk in pool.map(lambda chunk: _tensor_records(chunk, windows), chunks) for r in chunk]
            records += pool.map(_opaque_record, [file for file in files if file.suffix != _SAFETENSORS])
        _digests[stamp] = tagged_digest("kvplug.weights", *sorted(records))
    return _digests[stamp]


@dataclass(frozen=True)
class _Tensor:
    file: Path
    name: str
    dtype: str
    shape: list[int]
    #: Bytes from the start of the file.
    start: int
    stop: int


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # vLLM loads what is at the top. Some formats have folders.
    for pattern in ("*", "*/**/*"):
        found = sorted(file for file in path.glob(pattern) if _is_weights(file.relative_to(path)) and file.is_file())
        if found:
            return found
    return []


def _is_weights(path: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.parts)
    return not hidden and path.suffix in (_SAFETENSORS, *_OPAQUE) and path.name not in _NOT_WEIGHTS


def _file_stamp(file: Path) -> tuple[str, int, int, int]:
    status = file.stat()
    return (str(file), status.st_size, status.st_mtime_ns, status.st_ino)


def _tensors_of(file: Path) -> list[_Tensor]:
    try:
        return list(_read_tensors(file))
    except (struct.error, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} isn't a complete safetensors file ({error}); download it again, or set model_id."
        ) from error


def _read_tensors(file: Path) -> Iterator[_Tensor]:
    """Read a safetensors file's header: its length in 8 bytes, then JSON with offsets from the header's end."""
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        (length,) = struct.unpack("<Q", stream.read(8))
        data = 8 + length
        if data > size or length > _MAX_HEADER:
            raise ValueError("its header is cut off")
        for name, entry in json.loads(stream.read(length)).items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                if not 0 <= start <= stop <= size - data:
                    raise ValueError(f"{name} is cut off")
                yield _Tensor(file, name, entry["dtype"], entry["shape"], data + start, data + stop)


def _tensor_records(tensors: list[_Tensor], windows: int) -> list[bytes]:
    records = []
    open_file: Path | None = None
    descriptor = -1
    try:
        for tensor in tensors:
            if tensor.file != open_file:
                if descriptor >= 0:
                    os.close(descriptor)
                descriptor = os.open(tensor.file, os.O_RDONLY)
                open_file = tensor.file
                _no_readahead(descriptor)
            samples = b"".join(
                os.pread(descriptor, size, offset) for offset, size in _windows(tensor.start, tensor.stop, windows)
            )
            shape = json.dumps(tensor.shape).encode()
            records.append(tagged_digest("tensor", tensor.name.encode(), tensor.dtype.encode(), shape, samples))
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return records


def _opaque_record(file: Path) -> bytes:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        _no_readahead(descriptor)
        size = os.fstat(descriptor).st_size
        samples = b"".join(os.pread(descriptor, n, offset) for offset, n in _windows(0, size, _OPAQUE_WINDOWS))
    finally:
        os.close(descriptor)
    return tagged_digest("file", file.suffix.encode(), size.to_bytes(8, "little"), samples)


def _windows(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """Place windows evenly over the bytes from start to stop, as (offset, size); one of all of it if it's small."""
    size = stop - start
    if size <= max(count, 3) * _WINDOW:
        return [(start, size)]
    if count == 1:
        return [(start + (size - _WINDOW) // 2, _WINDOW)]
    return [(start + (size - _WINDOW) * i // (count - 1), _WINDOW) for i in range(count)]


def _no_readahead(descriptor: int) -> None:
    """Keep the system from reading 128 KiB around each sample, where it can be told."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)


def _commit_of_snapshot(path: Path) -> str | None:
    """Return the commit of a directory in a Hub cache (`…/snapshots/COMMIT`) whose weights are the cache's own."""
    path = path.absolute()
    if path.parent.name != "snapshots" or not _is_commit(path.name):
        return None
    blobs = (path.parent.parent / "blobs").resolve()
    files = _weight_files(path)
    # Somebody may have put other weights there.
    return path.name if files and all(file.resolve().parent == blobs for file in files) else None


def _cached_commit(repository: str, revision: Any, cache_dir: str | None) -> str | None:
    """Return the commit of a Hub repository's snapshot on this machine, without the network."""
    # vLLM resolves the revision since 0.32, and keeps the commit beside it.
    resolved = str(getattr(revision, "resolved", revision))
    if _is_commit(resolved):
        return resolved
    try:
        from huggingface_hub import snapshot_download

        snapshot = snapshot_download(repository, revision=revision, cache_dir=cache_dir, local_files_only=True)
    except (ImportError, OSError, ValueError):
        return None
    commit = Path(snapshot).name
    return commit if _is_commit(commit) else None


def _is_commit(name: str) -> bool:
    return len(name) == _COMMIT_LENGTH and all(character in "0123456789abcdef" for character in name)
