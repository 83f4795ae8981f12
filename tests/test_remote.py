"""--load-format remote: a folder behind HTTP, or anything else that fsspec reads."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from sgla.cli import main
from sgla.config import Config
from sgla.errors import ConfigError, NotDownloaded
from sgla.hub import fetch
from sgla.hub import remote as remote_files
from sgla.loading.source import configured_source
from sgla.messages import Progress

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 97,
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.model": b"pieces",
    "model.safetensors": b"weights" * 1000,
    "optimizer.bin": b"no weights",
    "pytorch_model.bin": b"the same again",
}
WANTED = {"config.json", "tokenizer.model", "model.safetensors"}


class Quiet(http.server.SimpleHTTPRequestHandler):
    asked: list[str] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    folder = tmp_path / "site" / "model"
    folder.mkdir(parents=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / "sub").mkdir()
    Quiet.asked.clear()
    handler = functools.partial(Quiet, directory=str(folder.parent))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/model"
    server.shutdown()
    server.server_close()


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    for name, data in FILES.items():
        fs.pipe(f"/bucket/model/{name}", data)
    yield "memory://bucket/model"
    fs.rm("/bucket", recursive=True)


def remote(url: str, tmp_path: Path, **changes: Any) -> Config:
    return Config(model=url, load_format="remote", download_dir=str(tmp_path / "cache"), **changes)


def held(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name[0] != "."}


@pytest.mark.parametrize("kind", ["site", "memory"])
def test_a_folder_is_copied_once(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    config, seen = remote(request.getfixturevalue(kind), tmp_path), list[Progress]()
    assert fetch.find_local(config) is None
    folder = fetch.resolve_model(config, seen.append)
    assert held(folder) == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    assert seen[-1].done == seen[-1].total > 7000
    assert fetch.find_local(config) == folder
    source = configured_source(folder, config)
    assert (source.kind, [path.name for path in source.files]) == ("safetensors", ["model.safetensors"])


class FakeRedis:
    """What ``redis.Redis`` has of strings."""

    values: dict[bytes, bytes] = {f"a*b/model/{name}".encode(): data for name, data in FILES.items()}
    asked: list[str] = []

    @classmethod
    def from_url(cls, url: str, **settings: Any) -> FakeRedis:
        cls.asked.append(url)
        return cls()

    def scan_iter(self, match: str, count: int) -> Iterator[bytes]:
        plain = match.replace("\\*", "[*]")
        names = [*self.values, b"a*b/model/sub/x", b"axb/model/config.json", b"a*b/other"]
        return (name for name in names if fnmatch.fnmatchcase(name.decode(), plain))

    def strlen(self, name: str) -> int:
        return len(self.values[name.encode()])

    def getrange(self, name: str, first: int, last: int) -> bytes:
        return self.values[name.encode()][first : last + 1]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://bucket/model", r"s3:// needs s3fs: pip install 'sgla\[remote\]'"),
        ("gs://bucket/model", r"gs:// needs gcsfs: pip install 'sgla\[remote\]'"),
        ("az://bucket/model", "az:// needs adlfs: pip install adlfs"),
    ],
)
def test_a_client_that_is_missing_is_named(
    url: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*args: Any, **options: Any) -> None:
        raise ImportError

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(ConfigError, match=words):
        fetch.resolve_model(remote(url, tmp_path))


def test_a_model_in_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = remote("redis://:pass@host:6380/a*b/model?db=2", tmp_path)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis:// needs redis: pip install 'sgla\[redis\]'"):
        fetch.resolve_model(config)
    monkeypatch.setitem(sys.modules, "redis", SimpleNamespace(Redis=FakeRedis))
    monkeypatch.setattr("sgla.hub.redis_files.PIECE", 1000)
    folder = fetch.resolve_model(config)
    assert FakeRedis.asked == ["redis://:pass@host:6380?db=2"]
    assert held(folder) == WANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in WANTED)
    changed = {b"a*b/model/tokenizer.model": b"PIECES"}  # as long as before
    monkeypatch.setattr(FakeRedis, "values", FakeRedis.values | changed)
    assert (fetch.resolve_model(config) / "tokenizer.model").read_bytes() == b"PIECES"


def test_what_has_not_changed_stays(site: str, memory: str, tmp_path: Path) -> None:
    config, fs = remote(memory, tmp_path), fsspec.filesystem("memory")
    folder = fetch.resolve_model(config)
    (folder / "tokenizer.model").write_bytes(b"kept")
    fs.pipe("/bucket/model/config.json", FILES["config.json"] + b" ")
    fs.pipe("/bucket/model/merges.txt", b"new")
    fs.rm("/bucket/model/optimizer.bin")
    assert held(fetch.resolve_model(config)) == WANTED | {"merges.txt"}
    assert (folder / "config.json").read_bytes() == FILES["config.json"] + b" "
    assert (folder / "tokenizer.model").read_bytes() == b"kept"
    fs.rm("/bucket/model/merges.txt")
    assert held(fetch.resolve_model(config)) == WANTED


def test_pickled_weights_and_gguf_come_where_there_are_no_others(memory: str, tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    fs.rm("/bucket/model/model.safetensors")
    folder = fetch.resolve_model(remote(memory, tmp_path))
    assert held(folder) == {"config.json", "tokenizer.model", "pytorch_model.bin"}
    for name in FILES:
        if name != "model.safetensors":
            fs.rm(f"/bucket/model/{name}")
    fs.pipe("/bucket/model/a-Q4_0.gguf", b"GGUF")
    assert fetch.resolve_model(remote(memory, tmp_path)).name == "a-Q4_0.gguf"


def test_what_cannot_be_read_is_refused(
    site: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for url, words in {
        site.replace("/model", "/gone"): "cannot be read: it is not there$",
        "http://127.0.0.1:9/model": "cannot be read",
        "http://name:secret@127.0.0.1:9/model": "^http://127.0.0.1:9/model",
        "memory://nothing/here": "cannot be read",
    }.items():
        with pytest.raises(NotDownloaded, match=words) as caught:
            fetch.resolve_model(remote(url, tmp_path))
        assert "secret" not in caught.value.message
    for url, words in {
        "strange://bucket/model": "strange:// is no kind that fsspec knows",
        "org/model": "wants the address of a folder, such as s3://BUCKET/MODEL",
    }.items():
        with pytest.raises(ConfigError, match=words):
            fetch.resolve_model(remote(url, tmp_path))
    with pytest.raises(ConfigError, match="is an address, and no hub id: give --load-format remote"):
        fetch.resolve_model(Config(model=site))
    assert main(["explain", "org/model", "--load-format", "remote"]) == 2
    assert "wants the address" in capsys.readouterr().err


def test_what_a_server_may_send_has_bounds(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page and a file without an end, and a file larger than was said. Time has none but for silence."""
    config, endless = remote(site, tmp_path), b"20000\r\n" + b"x" * 0x20000 + b"\r\n"

    def do_get(handler: Quiet, there: Any = Quiet.do_GET) -> None:
        if handler.path != broken:
            return there(handler)
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for _ in range(2000):
                handler.wfile.write(endless)
        return None

    monkeypatch.setattr(Quiet, "do_GET", do_get)
    monkeypatch.setattr(Quiet, "protocol_version", "HTTP/1.1")
    monkeypatch.setattr(remote_files, "PAGE_BYTES", 1 << 20)
    for path, words in {
        "/model/": "page of files has more than 1048576",
        "/model/config.json": "more than the [0-9]+ bytes",
    }.items():
        broken = path
        with pytest.raises(NotDownloaded, match=words):
            fetch.resolve_model(config)
    broken = ""
    folder = fetch.resolve_model(config)
    assert held(folder) == WANTED
    assert not list(folder.glob(".*.part"))
    monkeypatch.setattr(remote_files, "free_bytes", lambda folder: remote_files.SPARE_BYTES + 10)
    (tmp_path / "site" / "model" / "config.json").write_bytes(b"{}" * 99)
    with pytest.raises(NotDownloaded, match="does not fit the disk"):
        fetch.resolve_model(config)
    for path in (tmp_path / "site" / "model").iterdir():
        path.unlink() if path.is_file() else path.rmdir()
    with pytest.raises(NotDownloaded):
        fetch.resolve_model(config)
    assert held(folder) == WANTED, "a folder that is empty for a moment costs nobody the copy"
    assert remote_files._client()["timeout"].total is None


def test_names_that_lead_out_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    from sgla.hub.remote import _listed

    class Hostile:
        def ls(self, root: str, detail: bool) -> list[str]:
            return [
                f"{root}{name}" for name in ("../a.json", "..", "b/c.json", ".d.json", "e.json", "?C=N", "/")
            ]

    assert list(_listed(Hostile(), "s3://x/y")) == ["e.json"]
