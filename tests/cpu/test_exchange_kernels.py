"""What ranks tell each other through inboxes, by the kernels for GPUs, with threads of this machine."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from sgla.kernels.build import source_folder

PROGRAM = Path(__file__).with_name("ranks_of_threads.cpp")
OTHERWISE = {  # functions of instructions that only a GPU has
    "u64 nanoseconds()": "return 0;",
    "void send(uint4* to, uint4 v)": "store(reinterpret_cast<u32*>(to), v);",
    "uint4 look(const uint4* from)": "return load(reinterpret_cast<const u32*>(from));",
}


def kernels() -> str:
    """The source of the exchanges, without what is not of this machine."""
    folder = source_folder("cuda")
    text = (folder / "inbox.cuh").read_text() + (folder / "all_reduce.cu").read_text()
    text = re.sub(r"#include .*|#pragma once", "", text[: text.index("struct MaxParams")])
    for head, body in OTHERWISE.items():
        text, count = re.subn(
            re.escape(head) + r" \{.*?\n\}\n", lambda _, own=f"{head} {{ {body} }}\n": own, text, flags=re.S
        )
        assert count == 1, head
    return text


@pytest.mark.parametrize(
    ("ranks", "two_shot", "sent"), [(3, 1, 0), (2, 0, 2), pytest.param(2, 0, 0, marks=pytest.mark.slow)]
)
def test_ranks_that_go_on_by_themselves_hear_of_each_other(
    ranks: int, two_shot: int, sent: int, tmp_path: Path
) -> None:
    """Sums, sums of own rows and rows of all, of other sizes each time. Nothing is left in an inbox."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ (Debian: apt install g++)")
    (tmp_path / "kernels.inc").write_text(kernels())
    defines = {"RANKS": ranks, "THREADS": 32, "VECS": 2, "TWO_SHOT": two_shot, "NORM": 0, "SENT": sent}
    options = [f"-D{name}={value}" for name, value in defines.items()]
    program = tmp_path / "program"
    command = [
        "g++",
        "-std=c++20",
        "-w",
        "-pthread",
        f"-I{tmp_path}",
        *options,
        str(PROGRAM),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    told = subprocess.run([program], check=True, capture_output=True, text=True, timeout=120).stdout
    assert told == "0 0\n"
