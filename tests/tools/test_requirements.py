# SPDX-License-Identifier: Apache-2.0
"""The locked versions: what they are resolved from, and that all have hashes."""

import re
import zipfile
from pathlib import Path

import pytest

from tools import requirements
from tools.common import HERE, MACHINES, PYTHONS, ToolError

LOCKS = Path(HERE.root, "requirements")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def test_a_wheel_declares_what_it_needs_without_local_versions(tmp_path):
    rows = ["numpy", "torchaudio; platform_machine != 's390x'", "ray; extra == 'ray'"]
    rows += ["torch==2.14.0+cpu; platform_machine == 'x86_64'", "outlines_core==0.2.14"]
    metadata = "Name: vllm\n" + "".join(f"Requires-Dist: {row}\n" for row in rows)
    wheel = tmp_path / "one.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm-1.dist-info/METADATA", metadata)
    assert requirements.declared(wheel) == [
        "numpy",
        "torch==2.14.0; platform_machine == 'x86_64'",
        "outlines_core==0.2.14",
    ]


@pytest.mark.parametrize("name", ["cpu", "lint", "series", "tests", "trl"])
def test_all_that_is_locked_has_hashes(name):
    rows = requirements.packages((LOCKS / f"{name}.lock").read_text())
    assert rows
    without = [package for package, row in rows.items() if not HASH.search(row)]
    assert not without
    loose = [package for package, row in rows.items() if "==" not in row.split()[0]]
    assert not loose


def test_only_torch_is_left_to_the_index():
    torch = requirements.packages((LOCKS / "torch.lock").read_text())
    assert [*torch] == ["torch"]
    cpu = requirements.packages((LOCKS / "cpu.lock").read_text())
    assert not [name for name in cpu if requirements.FROM_TORCH.match(name)]


def test_what_one_machine_alone_needs_is_marked():
    hashes = " \\\n    --hash=sha256:00"
    common, own = f"numpy==2.0{hashes}", f"openmp==1{hashes}"
    by_machine = {"x86_64": {"numpy": common, "openmp": own}, "aarch64": {"numpy": common}}
    rows = requirements.merged(by_machine)
    marked = f"openmp==1 ; platform_machine == 'x86_64'{hashes}"
    assert rows == {"numpy": common, "openmp": marked}
    # uv repeats the markers of the file that it starts from.
    by_machine["x86_64"]["openmp"] = marked
    assert requirements.merged(by_machine) == rows
    by_machine["aarch64"]["numpy"] = f"numpy==2.1{hashes}"
    with pytest.raises(ToolError, match="^numpy differs between the machines x86_64, aarch64"):
        requirements.merged(by_machine)


def test_build_sh_runs_on_the_machines_that_are_locked_for():
    text = (HERE.root / "build.sh").read_text()
    assert tuple(re.findall(r"Linux-(\w+)", text)) == MACHINES


def test_build_sh_takes_the_pythons_that_are_locked_for():
    text = (HERE.root / "build.sh").read_text()
    bounds = re.search(r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", text)
    low, above = map(int, bounds.groups())
    assert tuple(f"3.{minor}" for minor in range(low, above)) == PYTHONS
    assert all(f"python{version}" in text for version in PYTHONS)
