# SPDX-License-Identifier: Apache-2.0
"""The server that the tests of scoring over HTTP share.

pytest imports this before the runner is chosen, so nothing here may import vLLM.
"""

import pytest


@pytest.fixture(scope="session")
def scoring_server(runner, model_folder, tmp_path_factory):
    """A server of the tiny Llama, which files of one subject each take in turn."""
    from live_server import live_server
    from scoring_server import OPTIONS, Server

    options = [f"--{name}={value}" for name, value in OPTIONS.items()]
    options += ["--enforce-eager", "--enable-scale-out"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with live_server(model_folder("llama"), options, runner, log) as started:
        yield Server(*started)


@pytest.fixture
def server(scoring_server):
    """That one; files that need another have a fixture of their own."""
    return scoring_server
