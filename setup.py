"""Wheels with compiled CPU kernels: ``SGLA_WHEEL_KERNELS=avx2,avx512 python -m build --wheel``.

The variable names instruction-set levels (sgla/kernels/build.py). The wheel then is for this platform, and
its users need no compiler. Without the variable the wheel is pure Python, and kernels are compiled at the
first start. Links lead to the repository whose workflow builds the release.
"""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

LEVELS = os.environ.get("SGLA_WHEEL_KERNELS", "")
REPOSITORY = (
    "{GITHUB_SERVER_URL}/{GITHUB_REPOSITORY}".format_map(os.environ)
    if "GITHUB_REPOSITORY" in os.environ
    else ""
)
LINKS = {
    "Source": REPOSITORY,
    "Documentation": f"{REPOSITORY}/tree/main/docs",
    "Changes": f"{REPOSITORY}/blob/main/CHANGELOG.md",
    "Issues": f"{REPOSITORY}/issues",
}


class Platform(Distribution):
    def has_ext_modules(self) -> bool:
        return bool(LEVELS)


class BuildKernels(build_py):
    def run(self) -> None:
        super().run()
        if LEVELS and not self.editable_mode:
            folder = Path(self.build_lib, "sgla", "kernels", "compiled")
            command = [sys.executable, "-m", "sgla.kernels.build", "--isa", LEVELS, "--into", str(folder)]
            environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
            subprocess.run(command, check=True, env=environment)
            for lock in folder.rglob("*.lock"):
                lock.unlink()


class AnyPython(bdist_wheel):
    """The kernels know nothing of Python: one wheel for all its versions."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    project_urls=LINKS if REPOSITORY else {},
    distclass=Platform,
    cmdclass={"build_py": BuildKernels, "bdist_wheel": AnyPython},
)
