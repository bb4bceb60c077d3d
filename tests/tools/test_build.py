# SPDX-License-Identifier: Apache-2.0
"""Steps run once, go on after a failure, and fail in words."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools import stamp, steps
from tools.common import HERE, Checkout, ToolError, clean_environment
from tools.index import pip_environment
from tools.processes import Log


class Fork:
    """Two steps that count their runs; the second fails while ``broken`` exists."""

    def __init__(self, root: Path) -> None:
        self.checkout = Checkout(root)
        self.input = root / "input"
        self.broken = root / "broken"
        self.input.write_text("one")

    def step(self, name: str, code: str) -> steps.Step:
        count = f"open({str(self.runs(name))!r}, 'a').write('x')"
        return steps.Step(
            name,
            f"the {name} step",
            lambda: stamp.key(self.input),
            lambda: True,
            [[sys.executable, "-c", f"{count}\n{code}"]],
        )

    def runs(self, name: str) -> Path:
        return self.checkout.root / f"{name}.runs"

    def build(self) -> None:
        code = f"import os, sys\nsys.exit(os.path.exists({str(self.broken)!r}))"
        chosen = [self.step("first", ""), self.step("second", code)]
        steps.run_steps(self.checkout, chosen, Log(self.checkout, "build"))

    def counts(self) -> tuple[int, int]:
        first, second = (self.runs(name) for name in ("first", "second"))
        return len(first.read_text()), len(second.read_text())


@pytest.fixture
def fork(tmp_path: Path) -> Fork:
    return Fork(tmp_path)


def test_a_second_build_does_nothing(fork, capsys):
    fork.build()
    fork.build()
    assert fork.counts() == (1, 1)
    assert capsys.readouterr().out.count("up to date") == 2


def test_a_changed_input_is_built_again(fork):
    fork.build()
    fork.input.write_text("two")
    fork.build()
    assert fork.counts() == (2, 2)


def test_a_failed_build_goes_on_where_it_stopped(fork):
    fork.broken.touch()
    with pytest.raises(ToolError, match="full log: .*build.log"):
        fork.build()
    fork.broken.unlink()
    fork.build()
    assert fork.counts() == (1, 2)


def test_a_full_disk_is_named_before_a_step_starts(fork, monkeypatch):
    monkeypatch.setattr(steps, "_SPACE", {"first": 10**18})
    with pytest.raises(ToolError, match="GiB of disk space"):
        fork.build()
    assert not fork.runs("first").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_end_is_an_interruption(number):
    program = (
        "import signal, time\n"
        "from tools.common import run_main\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # these tests may run under nohup
        "run_main(lambda: (print('runs', flush=True), time.sleep(60)))\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(
        command, cwd=HERE.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline()
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    assert (process.returncode, said) == (1, b"interrupted\n")


def test_an_environment_that_is_there_needs_no_space_for_another(fork, monkeypatch):
    monkeypatch.setattr(steps, "_SPACE", {"environment": 10**18})
    with pytest.raises(ToolError, match="GiB of disk space"):
        steps._space(fork.checkout, "environment")
    python = fork.checkout.venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    script = python.with_name("pip")
    script.write_text(f"#!{python}\n")
    steps._space(fork.checkout, "environment")
    # One that was moved with its checkout runs the Python of the old place.
    script.write_text("#!/elsewhere/.venv/bin/python\n")
    assert not steps.works(str(python))


@pytest.mark.parametrize(
    "printed, said",
    [
        (
            "OSError: [Errno 28] No space left on device",
            "the disk is full; .* 12 where",
        ),
        ("Max retries exceeded with url: /simple/", "PIP_INDEX_URL and the proxy"),
        ("a\\nerror: upstream.lock: no sdist", "^upstream.lock: no sdist\nfull log"),
        ("[Errno 28] No space left on device\\nerror: pip failed", "^the disk is full"),
        ("No such version\\nerror: pip failed, see above", "^No such version\npip failed"),
        ("Cannot install a and b\\nResolutionImpossible", "failed:\n  Cannot install"),
    ],
)
def test_a_failed_step_is_explained(fork, printed, said):
    step = fork.step("first", f"print('{printed}')\nraise SystemExit(1)")
    with pytest.raises(ToolError, match=said):
        steps.run_steps(fork.checkout, [step], Log(fork.checkout, "build"))


def test_two_builds_do_not_run_at_once(fork):
    with (
        steps.alone(fork.checkout),
        pytest.raises(ToolError, match="another build"),
        steps.alone(fork.checkout),
    ):
        pass


def test_a_file_system_without_locks_is_no_other_build(fork, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "not implemented")

    monkeypatch.setattr(steps.fcntl, "flock", refuse)
    with steps.alone(fork.checkout):
        assert "no locks" in capsys.readouterr().out


def test_nothing_of_the_users_python_reaches_a_step(fork, monkeypatch):
    for name in ("PYTHONPATH", "PIP_TARGET", "VLLM_TARGET_DEVICE"):
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("PIP_INDEX_URL", "kept")
    made = clean_environment(fork.checkout)
    assert "elsewhere" not in made.values() and made["PIP_INDEX_URL"] == "kept"


def test_of_pips_settings_only_the_way_to_the_index_reaches_a_step(
    fork, monkeypatch, tmp_path
):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\nextra-index-url =\n  http://a/\n  http://b/\ntarget = elsewhere\n"
        "[install]\nuser = true\nconstraint = /elsewhere.txt\n"
        "use-feature = truststore fast-deps\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    for name in ("CONSTRAINT", "PYTHON", "DRY_RUN"):
        monkeypatch.setenv(f"PIP_{name}", "/elsewhere.txt")
    made = pip_environment(fork.checkout)
    command = [sys.executable, "-m", "pip", "config", "list"]
    said = subprocess.run(command, env=made, capture_output=True, text=True).stdout
    assert "http://a/" in said and "http://b/" in said
    assert "elsewhere" not in said and "user" not in said
    assert made["PIP_USE_FEATURE"] == "truststore"
    assert made["PIP_CACHE_DIR"].startswith(str(fork.checkout.root))
    assert "elsewhere" not in str(made)


def test_another_python_is_refused_with_the_supported_one(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "uname", "git"):
        (programs / name).symlink_to(shutil.which(name))
    python = programs / "python3"
    python.write_text(
        '#!/bin/bash\n[[ $1 == --version ]] && echo "Python 3.9.1"\nexit 1\n'
    )
    python.chmod(0o755)
    result = subprocess.run(
        [str(HERE.root / "build.sh")],
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "Python 3.11, 3.12 or 3.13" in result.stderr and "Python 3.9.1" in result.stderr


def test_a_series_holds_for_a_process_under_a_hostile_configuration(forked, hostile):
    """A small one: the real one is a part of the tests by itself."""
    hostile()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    code = (
        "from pathlib import Path; from tools import series; from tools.common import Checkout; "
        f"series.HERE = Checkout(Path({str(forked.root)!r})); series.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "check"],
        cwd=HERE.root,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
