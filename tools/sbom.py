# SPDX-License-Identifier: Apache-2.0
"""Write the bill of materials of a wheel, and of what it was tested with.

``./build.sh sbom`` leaves a CycloneDX document beside the wheel in ``dist/``. What is
listed is what ``.venv`` holds, with versions, licences and dependencies as the packages
declare them. It must be what ``requirements/cpu.lock`` and ``torch.lock`` name.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tools import fetch, lock as locks
from tools.common import HERE, Checkout, ToolError, run_main, write_atomically
from tools.lock import Target
from tools.requirements import FROM_TORCH

_NOT_LISTED = {"libfaketime", "pip", "trl", "vllm"}
"""Of the environment: its installer, what the tests add, and the wheel itself."""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def components(document: dict, locked: list[str]) -> list[dict]:
    """The components of a CycloneDX document that lock rows name, or that torch brings.

    Raises:
        ToolError: they are not what is locked; the first few differences are named.
    """
    rows = [Requirement(row.rstrip("\\ ")) for row in locked if row[:1].isalnum()]
    wanted = {
        _plain(row.name): str(row.specifier).removeprefix("==")
        for row in rows
        if not row.marker or row.marker.evaluate()
    }
    there = {_plain(one["name"]): one for one in document["components"]}
    brought = {name for name in there if FROM_TORCH.match(name)} - {*wanted}
    wrong = [
        f"  {name}: locked {wanted.get(name, 'not')}, there {found or 'not'}"
        for name in sorted({*wanted, *there} - _NOT_LISTED - brought)
        if (found := there.get(name, {}).get("version", "").partition("+")[0])
        != wanted.get(name)
    ]
    if wrong:
        raise ToolError(
            "the environment is not what requirements/*.lock name: run ./build.sh\n"
            + "\n".join(wrong[:10])
        )
    return [there[name] for name in sorted({*wanted, *brought})]


def write(checkout: Checkout) -> Path:
    """Write ``dist/WHEEL.cdx.json``.

    Raises:
        ToolError: there is no wheel yet, or the environment is not the locked one.
    """
    wheels = locks.read(checkout).built(checkout, Target("cpu"))
    if not wheels:
        raise ToolError("no wheel for the CPU in dist/: run ./build.sh first")
    wheel = wheels[0]
    program = Path(sys.executable).with_name("cyclonedx-py")
    command = [str(program), "environment", str(checkout.venv / "bin" / "python")]
    command += ["--output-reproducible", "--output-format", "JSON"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise ToolError(f"cyclonedx-py failed:\n{result.stderr.strip()}")
    document = json.loads(result.stdout)
    files = (checkout.root / "requirements" / f"{one}.lock" for one in ("cpu", "torch"))
    locked = [row for file in files for row in file.read_text().splitlines()]
    (itself,) = [one for one in document["components"] if one["name"] == "vllm"]
    document["components"] = components(document, locked)
    itself["hashes"] = [{"alg": "SHA-256", "content": fetch.sha256(wheel)}]
    itself.pop("externalReferences", None)  # the path that it was installed from
    document["metadata"]["component"] = itself
    left = {itself["bom-ref"], *(one["bom-ref"] for one in document["components"])}
    document["dependencies"] = [
        row | {"dependsOn": [ref for ref in row.get("dependsOn", []) if ref in left]}
        for row in document.get("dependencies", [])
        if row["ref"] in left
    ]
    path = wheel.with_suffix(".cdx.json")
    write_atomically(path, json.dumps(document, indent=1).encode() + b"\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(prog="./build.sh sbom", description=__doc__)
    parser.parse_args()
    print(write(HERE).relative_to(HERE.root))


if __name__ == "__main__":
    run_main(main)
