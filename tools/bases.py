# SPDX-License-Identifier: Apache-2.0
"""Upstream releases as git commits, the same commit id on every machine.

``build/bases.git`` is a bare repository with one commit, and one branch
``base/RELEASE``, per imported release.
"""

import shutil
import tarfile
from pathlib import Path

import git

from tools.common import Checkout, ToolError
from tools.hermetic import BASE_DATE, ID_EMAIL, ID_NAME, first_lines, hermetic_git

UPSTREAM_URL = "https://github.com/vllm-project/vllm.git"

# Written into the source archive when upstream packed it; not in its repository.
_GENERATED = ("PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py")


def branch(release: str) -> str:
    return f"base/{release}"


def in_clone(release: str) -> str:
    """The name of a base in what ``check_out`` made."""
    return f"origin/{branch(release)}"


def has(checkout: Checkout, release: str) -> bool:
    """Whether a release was imported completely."""
    if not (checkout.bases / "HEAD").exists():
        return False
    try:
        hermetic_git(checkout.bases).rev_parse(
            "--verify", "--quiet", f"refs/heads/{branch(release)}^{{tree}}"
        )
    except git.GitCommandError:
        return False
    return True


def tree(checkout: Checkout, release: str) -> str:
    """Tree hash of an imported release."""
    return hermetic_git(checkout.bases).rev_parse(f"{branch(release)}^{{tree}}")


def commit(checkout: Checkout, release: str) -> str:
    """Commit of an imported release."""
    return hermetic_git(checkout.bases).rev_parse(branch(release))


def _repository(checkout: Checkout) -> git.Git:
    checkout.bases.parent.mkdir(parents=True, exist_ok=True)
    repository = hermetic_git(checkout.bases.parent)
    repository.init("--quiet", "--bare", "--template=", str(checkout.bases))
    return hermetic_git(checkout.bases)


def import_sdist(checkout: Checkout, archive: Path, release: str) -> str:
    """Commit the files of a source archive as the base of ``release``.

    The caller has verified the archive. Files that the packing step generated are
    left out, every other one is kept whatever an ignore file says.

    Returns:
        the tree hash.

    Raises:
        ToolError: the archive does not hold one folder ``vllm-RELEASE``.
    """
    repository = _repository(checkout)
    with checkout.scratch() as folder:
        with tarfile.open(archive) as source:
            # Python before 3.11.4, which Debian 12 has, knows no filters.
            source.extraction_filter = getattr(tarfile, "data_filter", None)
            source.extractall(folder)
        root = folder / f"vllm-{release}"
        if not (root / "setup.py").is_file():
            raise ToolError(f"{archive.name} does not hold vllm-{release}/setup.py")
        for name in _GENERATED:
            path = root / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        files = hermetic_git(root)
        files.update_environment(
            GIT_DIR=str(checkout.bases),
            GIT_WORK_TREE=str(root),
            GIT_INDEX_FILE=str(folder / "index"),
        )
        files.add("--all", "--force")
        imported = files.write_tree()
    repository.update_environment(
        GIT_AUTHOR_NAME=ID_NAME,
        GIT_AUTHOR_EMAIL=ID_EMAIL,
        GIT_AUTHOR_DATE=BASE_DATE,
        GIT_COMMITTER_DATE=BASE_DATE,
    )
    commit = repository.commit_tree(imported, "-m", f"vLLM {release}")
    repository.update_ref(f"refs/heads/{branch(release)}", commit)
    return imported


def import_tag(checkout: Checkout, release: str, commit: str, url: str) -> str:
    """Clone upstream's own repository at the tag, for people who prepare PRs.

    Args:
        commit: what the tag must point to, possibly shortened.

    Raises:
        ToolError: the repository can not be reached or the tag is another commit.
    """
    repository = _repository(checkout)
    tag = f"refs/tags/v{release}"
    try:
        repository.fetch("--quiet", "--depth=1", "--no-tags", url, f"{tag}:{tag}")
    except git.GitCommandError as error:
        raise ToolError(
            f"{url} could not be cloned at v{release}:\n  {first_lines(error)}"
        ) from None
    found = repository.rev_parse(f"{tag}^{{commit}}")
    if not found.startswith(commit):
        repository.update_ref("-d", tag)
        raise ToolError(
            f"v{release} of {url} is not the commit that upstream.lock names\n"
            f"  expected {commit}\n  actual   {found}"
        )
    repository.update_ref(f"refs/heads/{branch(release)}", found)
    return tree(checkout, release)


def check_out(
    checkout: Checkout, release: str, folder: Path, files: bool = True
) -> git.Git:
    """Clone a base into ``folder``, with no branch checked out.

    Args:
        files: write the files as well. Without, git takes each that it needs from the
            index, which is enough to apply patches.

    Raises:
        ToolError: the release was not imported.
    """
    if not has(checkout, release):
        raise ToolError(f"vLLM {release} is not imported yet: run ./build.sh first")
    hermetic_git(checkout.build).clone(
        "--quiet", "--local", "--no-checkout", "--template=", "--branch",
        branch(release), str(checkout.bases), str(folder),
    )  # fmt: skip
    repository = hermetic_git(folder)
    repository.update_ref("--no-deref", "HEAD", in_clone(release))
    repository.branch("--quiet", "-D", branch(release))
    repository.reset("--quiet", "--hard" if files else "--mixed")
    return repository
