# SPDX-License-Identifier: Apache-2.0
"""A wheel without everything that the binaries' wheel holds is refused."""

import os
import zipfile
from pathlib import Path

import pytest
from conftest import RELEASE, commit

from tools import bases, fetch, lock as locks, stacks, upstream_tests, wheel
from tools.common import HERE, MACHINES, Checkout, ToolError
from tools.export import export
from tools.index import Unreachable
from tools.lock import Target
from tools.stacks import DEPTH, SCORING

LIBRARIES = {
    "vllm/_C.abi3.so": b"bf16",
    "vllm/_C_AVX2.abi3.so": b"avx2",
    "vllm/_C_AVX512.abi3.so": b"avx512",
}


def zipped(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


@pytest.fixture
def applied(forked, tmp_path):
    repository = bases.check_out(forked, RELEASE, tmp_path / "applied")
    return repository, bases.in_clone(RELEASE)


PYTHON = {"vllm/engine.py": b"x", "vllm/windows.py": b"x"}


def test_a_complete_wheel_passes(applied, tmp_path):
    theirs = zipped(tmp_path / "theirs.whl", LIBRARIES | PYTHON)
    extra = {"vllm/new.py": b"x", "vllm/engine.py": b"patched"}
    ours = zipped(tmp_path / "ours.whl", LIBRARIES | PYTHON | extra)
    wheel.verify(ours, theirs, *applied)


def test_a_dropped_library_is_named(applied, tmp_path):
    theirs = zipped(tmp_path / "theirs.whl", LIBRARIES | PYTHON)
    kept = {"vllm/_C.abi3.so": b"bf16", "vllm/_C_AVX2.abi3.so": b"avx2"}
    ours = zipped(tmp_path / "ours.whl", kept | PYTHON)
    with pytest.raises(ToolError, match="missing vllm/_C_AVX512.abi3.so"):
        wheel.verify(ours, theirs, *applied)


def test_a_changed_library_is_named(applied, tmp_path):
    theirs = zipped(tmp_path / "theirs.whl", LIBRARIES | PYTHON)
    built_here = {"vllm/_C.abi3.so": b"here"}
    ours = zipped(tmp_path / "ours.whl", LIBRARIES | PYTHON | built_here)
    with pytest.raises(ToolError, match="changed vllm/_C.abi3.so"):
        wheel.verify(ours, theirs, *applied)


def test_a_module_of_the_tree_that_is_left_out_is_named(applied, tmp_path):
    theirs = zipped(tmp_path / "theirs.whl", LIBRARIES)
    ours = zipped(tmp_path / "ours.whl", LIBRARIES)
    with pytest.raises(ToolError, match="missing vllm/engine.py"):
        wheel.verify(ours, theirs, *applied)


def test_the_tests_that_patches_touch_are_found(forked):
    contents = stacks.read(forked)
    assert upstream_tests.touched_by(contents, DEPTH) == ["tests/test_engine.py"]
    assert upstream_tests.touched(contents[DEPTH].values()) == []


def own_test(stack: str, value: int) -> bytes:
    code = f"def test_own():\n    from vllm.new import new\n\n    assert new == {value}\n"
    absent = {DEPTH: SCORING, SCORING: DEPTH}.get(stack)
    if absent:
        code += f"    import os\n\n    assert not os.path.exists('vllm/{absent}.py')\n"
    return code.encode()


def test_each_patch_is_tested_against_its_own_tree(forked):
    """Here the second of two patches mends what the first one breaks."""
    files = {"vllm/__init__.py": b"", "vllm/new.py": b"new = 2\n"}
    files |= {"tests/test_new.py": own_test(DEPTH, 1)}
    commit(forked, DEPTH, "[Core] Break\n\nUpstream-Status: Pending\n", files)
    files = {"vllm/new.py": b"new = 1\n", "tests/test_new.py": own_test(DEPTH, 1) + b"\n"}
    commit(forked, DEPTH, "[Core] Mend\n\nUpstream-Status: Pending\n", files)
    export(forked)
    assert upstream_tests.run_each_patch(forked, []) == ["depth/break.patch"]
    assert upstream_tests.run_stack(forked, DEPTH, []) == 0


def test_upstream_tests_run_beside_the_tree_without_its_package(forked):
    folder = upstream_tests.prepare(forked)
    assert "assert True" in (folder / "tests/test_engine.py").read_text()
    assert (folder / "setup.py").exists() and not (folder / "vllm").exists()


def test_a_deselected_test_needs_a_reason(forked):
    file = forked.root / "tests" / "upstream_deselect.txt"
    file.parent.mkdir()
    file.write_text("# why each one is here\ntests/a.py::b  # needs a model hub\n")
    assert upstream_tests.deselected(forked) == ["tests/a.py::b"]
    file.write_text("tests/a.py::b\n")
    with pytest.raises(ToolError, match="tests/a.py::b"):
        upstream_tests.deselected(forked)


@pytest.fixture
def there(tmp_path) -> Checkout:
    """This checkout's patches and archives in another folder."""
    if not locks.read(HERE).built(HERE, Target("cpu")):
        pytest.skip("no wheel in dist/: run ./build.sh first")
    there = Checkout(tmp_path / "a fork in a folder of another length")
    there.build.mkdir(parents=True)
    for name in ("upstream.lock", "patches", "build/bases.git", "build/downloads"):
        (there.root / name).symlink_to(HERE.root / name)
    return there


def test_a_build_elsewhere_gives_the_same_bytes(there, monkeypatch):
    """In another folder, at another time, for somebody with another umask and zone."""
    built = locks.read(HERE).built(HERE, Target("cpu"))
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    umask = os.umask(0o077)
    try:
        again = wheel.build(there, Target("cpu"))
    finally:
        os.umask(umask)
    assert again.name == built[0].name
    assert fetch.sha256(again) == fetch.sha256(built[0])


ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


def test_a_wheel_for_another_machine_differs_in_its_libraries_alone(there):
    here = Target("cpu")
    (other,) = (Target("cpu", name) for name in MACHINES if name != here.machine)
    try:
        fetch.fetch(HERE, other)
    except Unreachable as error:
        pytest.skip(str(error))
    except ToolError as error:
        if "the package index has no file" not in str(error):
            raise
        pytest.skip(str(error))
    built = wheel.build(there, other)
    assert built.name.endswith(f"-cp38-abi3-linux_{other.machine}.whl")
    (own,) = locks.read(HERE).built(HERE, here)
    with zipfile.ZipFile(built) as theirs, zipfile.ZipFile(own) as ours:
        files, own_files = ({n for n in one.namelist()} for one in (theirs, ours))
        libraries = {name for name in files if name.endswith(".so")}
        assert "vllm/_C.abi3.so" in libraries
        for name in libraries:
            header = theirs.read(name)[:20]
            assert header[:4] == b"\x7fELF"
            machine = int.from_bytes(header[18:20], "little")
            assert machine == ELF_MACHINES[other.machine], name
        assert files - libraries == {n for n in own_files if not n.endswith(".so")}
        different = {n for n in files - libraries if theirs.read(n) != ours.read(n)}
        assert {name.rpartition("/")[2] for name in different} == {"WHEEL", "RECORD"}
        (tags,) = (theirs.read(n).decode() for n in different if n.endswith("/WHEEL"))
        assert f"Tag: cp38-abi3-linux_{other.machine}\n" in tags
