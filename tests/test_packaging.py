"""What the repository promises outside the code: README, Dockerfile, CI, licence, wheel."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from statements import statements

import sgla
from sgla.cli.args import parse
from sgla.cli.settings import load_config
from sgla.config import Config
from sgla.http.app import ROUTES
from sgla.kernels.build import LEVELS, level, levels_of

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


def commands(text: str) -> list[list[str]]:
    """Words of every command in a shell block; comments dropped, continued lines joined, '&&' split."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        words for line in lines for part in line.split("&&") if (words := shlex.split(part, comments=True))
    ]


def test_the_two_commands_are_in_the_readme_and_ci_runs_the_second() -> None:
    shell = blocks("README.md", "bash")
    assert "pip install -e . && sgla serve\n" in shell
    assert "pip install -e '.[test]' && pytest\n" in shell
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = [line.strip() for line in script.read_text().splitlines()]
    assert "pip install --quiet -e '.[test]' || exit 1" in lines
    assert lines[-1] == "((code == 0 && ${#failed[@]} == 0))"
    assert {"check ruff check .", "check ruff format --check .", "check mypy"} <= set(lines)
    subprocess.run(["bash", "-n", str(script)], check=True)


def run_ci(tmp_path: Path, broken: str, failing: int | None = None) -> subprocess.CompletedProcess[str]:
    """With commands that do nothing. ``failing``: tests that pytest says have failed when it runs first."""
    for name in ("pip", "ruff", "mypy", "lint-imports", "pytest"):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\necho {name} ran\nexit {int(name == broken)}\n")
        command.chmod(0o755)
    if failing is not None:
        listed = "".join(f"a.py::test_{number}\\n" for number in range(failing))
        (tmp_path / "pytest").write_text(
            f"""#!/bin/sh
case "$*" in
*collect*) ;;
*last-failed*) echo again ;;
*) mkdir -p "$VIRTUAL_ENV/cache/v/cache"
   printf '{listed}' > "$VIRTUAL_ENV/cache/v/cache/lastfailed"
   exit 1 ;;
esac
"""
        )
    python = tmp_path / "python"  # makes an environment that has nothing
    python.write_text(f'#!/bin/sh\nmkdir -p "$3/bin" && cp {tmp_path}/[lmpr]* "$3/bin"\n')
    python.chmod(0o755)
    return subprocess.run(
        [str(ROOT / ".ci/run")], env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True
    )


@pytest.mark.parametrize("broken", ["", "mypy", "pytest"])
def test_ci_run_fails_if_anything_does(tmp_path: Path, broken: str) -> None:
    done = run_ci(tmp_path, broken)
    assert (done.returncode != 0) == bool(broken), done.stderr
    assert done.stdout.endswith("== pytest\npytest ran\n")
    assert done.stdout.index("mypy ran") < done.stdout.index("== pytest")


@pytest.mark.parametrize(("failing", "passes"), [(1, True), (5, True), (6, False)])
def test_ci_run_runs_a_few_failed_tests_again(tmp_path: Path, failing: int, passes: bool) -> None:
    done = run_ci(tmp_path, "", failing)
    assert (done.returncode == 0, "again\n" in done.stdout, "UNSTABLE" in done.stdout) == (passes,) * 3


def full(*parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ROOT / ".ci/full"), *parts], capture_output=True, text=True)


def test_ci_full_says_how_its_parts_ended() -> None:
    wrong = full("nonsense")
    assert wrong.returncode == 2
    parts = wrong.stderr.split("parts: ")[1].split()
    described = re.findall(r"^\| `(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert described == parts
    skipped = full("schemas")
    assert (skipped.returncode, skipped.stdout.count("skipped")) == (0, 2)


def test_sgla_commands_in_the_readme_parse() -> None:
    found = [
        words for block in blocks("README.md", "bash") for words in commands(block) if words[0] == "sgla"
    ]
    assert {words[1] for words in found} >= {"serve", "chat", "bench", "explain", "doctor", "replay"}
    for words in found:
        args = parse(words[1:])
        assert (ROOT / (getattr(args, "config", None) or "README.md")).is_file()


def test_flags_in_the_table_of_settings_exist() -> None:
    rows = re.findall(r"^\| `(--[a-z-]+)", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) > 5
    for flag in rows:
        assert flag == "--config" or flag[2:].replace("-", "_") in Config.__struct_fields__


def test_routes_in_the_readme_exist() -> None:
    table = (ROOT / "README.md").read_text().split("## What works today")[1].split("##")[0]
    routes = set(re.findall(r"`(/[a-z_/0-9]+)`", table))
    assert len(routes) > 8
    assert routes <= set(ROUTES)


def test_curl_bodies_are_json_for_routes_that_exist() -> None:
    calls = [
        words for block in blocks("README.md", "bash") for words in commands(block) if words[0] == "curl"
    ]
    assert calls
    for words in calls:
        assert {"messages", "input", "query"} & json.loads(words[words.index("-d") + 1]).keys()
        assert words[1].removeprefix(f"http://127.0.0.1:{Config().port}") in ROUTES


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles_and_links_lead_somewhere(page: str) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)
    for target in re.findall(r"\]\(([^)#\s]+)", (ROOT / page).read_text()):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target


# Dockerfile

INSTRUCTIONS = [
    tuple(line.split(None, 1))
    for line in re.sub(
        r"\\\n", " ", "\n".join(x for x in (ROOT / "Dockerfile").read_text().splitlines() if x[:1] != "#")
    ).splitlines()
    if line.strip()
]


def said(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return set(listed.stdout.splitlines())


def test_docker_copies_what_exists_and_is_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    local = [copy.split() for copy in said("COPY") if "--from" not in copy]
    assert local
    for *sources, _ in local:
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored
            assert any(path == source or path.startswith(f"{source}/") for path in tracked()), source


def test_docker_stages_use_what_they_were_given() -> None:
    build = "\n".join(f"{name} {rest}" for name, rest in INSTRUCTIONS).split("FROM")[1]
    for copy in said("COPY"):
        if "--from=build" in copy:
            source = copy.split()[-2]
            assert source in build, f"the build stage makes no {source}"
    names = {name.split("=")[0] for name in said("ARG")}
    used = set(re.findall(r"\$\{?([A-Z_]+)", (ROOT / "Dockerfile").read_text())) - {"PATH"}
    assert used == names
    for page in ("README.md", "Dockerfile"):
        assert set(re.findall(r"--build-arg ([A-Z_]+)=", (ROOT / page).read_text())) <= names


def test_docker_builds_kernels_that_exist() -> None:
    [line] = [rest for rest in said("RUN") if "SGLA_WHEEL_KERNELS" in rest]
    names = [name for names in re.findall(r"levels=([a-z0-9_,]+)", line) for name in names.split(",")]
    assert {level(name).name for name in names} == {level.name for level in LEVELS}


def test_docker_leaves_the_platform_to_the_builder() -> None:
    # A default of TARGETARCH stands for every platform that is built for: an image for ARM would get x86-64's
    # flags.
    assert not [name for name in said("ARG") if re.match(r"(TARGET|BUILD)(PLATFORM|OS|ARCH|VARIANT)=", name)]


def test_docker_entrypoint_and_healthcheck_fit_the_server() -> None:
    entry = [*json.loads(said("ENTRYPOINT")[0]), *json.loads(said("CMD")[0])]
    assert entry[0] in PROJECT["project"]["scripts"]
    assert parse(entry[1:]).flags == {}
    variables = dict(re.findall(r"(SGLA_\w+)=(\S+)", " ".join(said("ENV"))))
    config = load_config({}, environ=variables)
    assert (config.host, config.download_dir) == ("0.0.0.0", "/models")
    assert said("EXPOSE") == [str(config.port)]
    assert said("VOLUME") == ["/models"]
    check = json.loads(said("HEALTHCHECK")[0].partition("CMD ")[2])
    assert parse(check[1:]).command == "health"


def test_docker_installs_every_dependency_in_a_version_that_the_package_takes() -> None:
    lines = (ROOT / "configs/image-requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    torch = next(rest.partition("=")[2] for rest in said("ARG") if rest.startswith("TORCH="))
    for text in PROJECT["project"]["dependencies"]:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(torch if name == "torch" else pinned[name]), text


def test_docker_runs_without_rights() -> None:
    users = [number for number, (name, rest) in enumerate(INSTRUCTIONS) if name == "USER" and rest != "root"]
    entry = [number for number, (name, _) in enumerate(INSTRUCTIONS) if name == "ENTRYPOINT"]
    assert users
    assert users[-1] < entry[0]


def test_docker_run_lines_pass_flags_that_parse() -> None:
    runs = [
        words
        for block in blocks("README.md", "bash")
        for words in commands(block)
        if words[:2] == ["docker", "run"]
    ]
    assert any("--gpus" in words for words in runs)
    assert any("--gpus" not in words for words in runs)
    for words in runs:
        image = next(
            number for number, word in enumerate(words) if word.startswith("sgla") and ":/" not in word
        )
        parse(words[image + 1 :] or ["serve"])


# the package


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.strip().startswith("Apache License\n                           Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_versions_agree() -> None:
    assert PROJECT["project"]["version"] == sgla.__version__
    assert f"## {sgla.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def third_party(folder: str) -> set[str]:
    """Top-level modules that the Python files under ``folder`` import from other projects."""
    found: set[str] = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in statements(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    near = (folder, "bench") if folder == "tests" else (folder,)
    local = {path.stem for name in near for path in (ROOT / name).rglob("*.py")} | {"sgla"}
    return found - sys.stdlib_module_names - local


def declared(*extras: str) -> set[str]:
    groups = [
        PROJECT["project"]["dependencies"],
        *(PROJECT["project"]["optional-dependencies"][extra] for extra in extras),
    ]
    return {
        re.split(r"[^\w-]", requirement)[0].replace("-", "_").lower()
        for group in groups
        for requirement in group
    }


DISTRIBUTIONS = {
    "PIL": "pillow",
    "zmq": "pyzmq",
    "xdist": "pytest_xdist",
    "yaml": "pyyaml",
    "flashinfer": "flashinfer_python",
    "opentelemetry": "opentelemetry_sdk",
    "grpc": "grpcio",
    "grpc_health": "grpcio_health_checking",
    "grpc_reflection": "grpcio_reflection",
    "google": "protobuf",
    "mooncake": "mooncake_transfer_engine_non_cuda",
    "modelopt": "nvidia_modelopt",
}
# huggingface_hub needs tqdm, a CUDA build of torch triton, pytest packaging, openai pydantic, aiohttp
# multidict and yarl, ray[serve] starlette, llmcompressor datasets, mcp the others; DeepEP is built by hand
THROUGH_OTHERS = {
    "deep_ep",
    "tqdm",
    "datasets",
    "triton",
    "packaging",
    "pydantic",
    "multidict",
    "yarl",
    "anyio",
    "httpx2",
    "mcp_types",
    "starlette",
}


def test_every_import_is_a_declared_dependency() -> None:
    for folder, extras in (
        (
            "sgla",
            (
                "cuda",
                "otel",
                "modelscope",
                "eval",
                "mcp",
                "remote",
                "redis",
                "events",
                "grpc",
                "mm",
                "mooncake",
                "nixl",
                "ray",
            ),
        ),
        ("tests", ("test", "formats")),
    ):
        names = {DISTRIBUTIONS.get(module, module).lower() for module in third_party(folder)}
        assert names - THROUGH_OTHERS <= declared(*extras), folder


PARTS = ("sgla/", "csrc/", "pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


def copied(folder: Path, parts: tuple[str, ...] = PARTS) -> Path:
    """What the package is built from, as a checkout has it."""
    for name in tracked():
        if (ROOT / name).exists() and name.startswith(parts):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_symlink():
                (folder / name).symlink_to(os.readlink(ROOT / name))
            else:
                (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def wheel_of(source: Path, into: Path, **environment: str) -> zipfile.ZipFile:
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(into),
        str(source),
    ]
    subprocess.run(build, check=True, timeout=300, env=os.environ | environment)
    [wheel] = into.glob("sgla-*.whl")
    return zipfile.ZipFile(wheel)


def test_the_source_distribution_has_every_file(tmp_path: Path) -> None:
    if importlib.util.find_spec("setuptools") is None:  # to import it fails beside the library's distutils
        pytest.skip("setuptools is not installed")
    copy = copied(tmp_path / "copy", ("",))
    (tmp_path / "info").mkdir()
    listing = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path / "info")]
    subprocess.run(listing, cwd=copy, check=True)
    listed = (tmp_path / "info/sgla.egg-info/SOURCES.txt").read_text().splitlines()
    links = {name for name in tracked() if (ROOT / name).is_symlink()}  # what they lead to is there
    assert {name for name in tracked() if (ROOT / name).exists()} - links <= {*map(os.path.normpath, listed)}


@pytest.mark.slow
def test_a_wheel_has_all_files_and_kernels_that_are_found_without_a_compiler(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nwhile [ $1 != -o ]; do shift; done\necho library > $2\n")
    compiler.chmod(0o755)
    links = {"GITHUB_SERVER_URL": "https://example.org", "GITHUB_REPOSITORY": "someone/sgla"}
    copy = copied(tmp_path / "copy")
    wheel = wheel_of(copy, tmp_path, SGLA_WHEEL_KERNELS="generic,avx2", CXX=str(compiler), **links)
    assert re.search(r"-py3-none-linux_\w+\.whl$", str(wheel.filename))
    [metadata] = [name for name in wheel.namelist() if name.endswith("dist-info/METADATA")]
    assert "Project-URL: Source, https://example.org/someone/sgla\n" in wheel.read(metadata).decode()
    names = set(wheel.namelist())
    sources = {
        f"sgla/kernels/{path.relative_to(ROOT)}"
        for path in (ROOT / "csrc").glob("*/*")
        if path.suffix in (".cpp", ".h", ".cu", ".cuh")
    }
    assert sources
    assert names >= sources | {"sgla/py.typed", "sgla/cli/__init__.py", "sgla/http/page/index.html"}
    assert not [name for name in names if name.startswith(("tests", "bench")) or name.endswith(".lock")]

    site = tmp_path / "site"
    wheel.extractall(site)
    script = "from sgla.kernels.build import find; print(find())"
    environment = {"PYTHONPATH": str(site), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "none")}
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert "came with the package" in found.stdout, found.stderr
    assert str(site / "sgla/kernels/compiled") in found.stdout
    doctor = subprocess.run(
        [sys.executable, "-m", "sgla", "doctor"],
        env=environment,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert re.search(r"none; native CPU kernels \(\w+\) came with the package", doctor.stdout), doctor.stderr
    assert "torch operations" not in doctor.stdout


def test_kernels_are_compiled_by_the_standard_library_alone() -> None:
    """An isolated build has setuptools and nothing else."""
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from sgla.kernels import build"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


WORKFLOW: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_jobs_of_a_release_need_what_exists_and_load_what_others_store() -> None:
    jobs = WORKFLOW["jobs"]
    stored, loaded = set[str](), set[str]()
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= jobs.keys()
        rows = job.get("strategy", {}).get("matrix", {}).get("include", [{}])
        for step in job["steps"]:
            kind, _, version = step.get("uses", "").partition("@")
            assert bool(version) != ("run" in step)
            if kind.endswith("-artifact"):
                name = step["with"].get("name", "")
                machines = [row.get("machine", "") for row in rows]
                names = {name.replace("${{ matrix.machine }}", machine) for machine in machines}
                (stored if "upload" in kind else loaded).update(names)
    assert loaded - {""} <= stored
    assert len(stored) == 3


def test_a_release_builds_for_every_cpu_and_tries_pythons_that_are_declared() -> None:
    rows = WORKFLOW["jobs"]["wheel"]["strategy"]["matrix"]["include"]
    for row in rows:
        names = {level(name).name for name in row["levels"].split(",")}
        assert names == {level.name for level in levels_of(row["machine"])}
    classifiers = set(PROJECT["project"]["classifiers"])
    for python in WORKFLOW["jobs"]["try"]["strategy"]["matrix"]["python"]:
        assert f"Programming Language :: Python :: {python}" in classifiers
    runs = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    for run in runs:
        subprocess.run(["bash", "-n", "-c", run], check=True)
        for words in commands(run.split("|")[0]):
            if words[0] == "sgla":
                parse(words[1:])


def test_the_command_is_installed() -> None:
    scripts = importlib.metadata.entry_points(group="console_scripts", name="sgla")
    if not scripts:
        pytest.skip("sgla is not installed here")
    assert next(iter(scripts)).load() is sgla.cli.entry  # type: ignore[attr-defined]
