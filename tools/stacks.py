# SPDX-License-Identifier: Apache-2.0
"""The three stacks of patches: their files, as git branches, and back.

``fixes`` stands on the upstream release, ``scoring`` and ``depth`` each stand on
``fixes``. ``all`` is fixes, scoring and depth applied one after the other.
"""

import re
from pathlib import Path

import git

from tools import bases
from tools.common import Checkout, ToolError
from tools.hermetic import first_lines, hermetic_git
from tools.lock import Lock

FIXES, SCORING, DEPTH = STACKS = ("fixes", "scoring", "depth")
ALL = "all"
BRANCHES = (*STACKS, ALL)

# The patches of each stack: contents by file name, in the order of the stack.
Contents = dict[str, dict[str, bytes]]

_NAME_LENGTH = 60
_FORMAT = [
    "--keep-subject", "--zero-commit", "--no-signature", "--full-index", "--no-stat",
    "--no-numbered", "--no-attach", "--no-thread", "--no-cover-letter", "--no-base",
    "--no-notes", "--no-to", "--no-cc", "--no-add-header", "--no-signoff",
    "--no-encode-email-headers", "--no-ext-diff", "--no-textconv", "--no-renames",
    "--no-color", "--binary", "--unified=3", "--inter-hunk-context=0",
    "--diff-algorithm=histogram", "--src-prefix=a/", "--dst-prefix=b/",
    "-O/dev/null", "--suffix=.patch", "--quiet",
]  # fmt: skip
_AM = [
    "--quiet", "--keep-non-patch", "--keep-cr", "--no-3way", "--no-scissors",
    "--no-gpg-sign", "--no-signoff", "--committer-date-is-author-date",
]  # fmt: skip
_BY_HAND = """
If the patch was edited by hand, restore it (`git checkout patches/`) and edit through
`./build.sh series open` and `export`. If upstream moved, use `rebase VERSION`."""
_ON_SCORING = """
It applies to fixes, but not to fixes and scoring together: a hunk of each changes the
same place. On branch `depth`, move this hunk some lines away from scoring's."""


class DoesNotApply(ToolError):
    """A patch does not apply.

    Attributes:
        name: of its file.
        paths: the files that it does not fit.
    """

    def __init__(self, stack: str, name: str, output: str, hint: str) -> None:
        places = re.findall(r"error: patch failed: (.+?):(\d+)", output)
        places += re.findall(
            r"error: (.+?): ((?:does not exist|already exists) in \w[\w ]*)", output
        )
        self.name, self.paths = name, [path for path, _ in places]
        rows = [f"  {path} ({'line ' * at.isdigit()}{at})" for path, at in places]
        said = re.findall(r"(?:error|fatal): (.+)", output)
        rows = rows or [f"  {line.rstrip(chr(39))}" for line in said[:3]]
        named = f"patches/{stack}/{name} does not apply"
        super().__init__("\n".join([named, *rows]) + hint)


def own_folder(repository: git.Git) -> Path:
    """Where git keeps what is of one working tree; a linked one's `.git` is a file."""
    return Path(repository.rev_parse("--absolute-git-dir"))


def below(stack: str, base: str) -> str:
    """The branch that a stack stands on; ``base`` is the upstream release's."""
    return base if stack == FIXES else FIXES


def layers(branch: str) -> tuple[str, ...]:
    """The stacks that make a branch, in the order in which they apply."""
    return {FIXES: (FIXES,), ALL: STACKS}.get(branch, (FIXES, branch))


# ---------------------------------------------------------------- files


def listed(checkout: Checkout, stack: str) -> list[str]:
    """The names in a stack's ``series`` file, in order.

    Raises:
        ToolError: there is no such file, or it names a patch twice.
    """
    file = checkout.patches / stack / "series"
    if not file.exists():
        raise ToolError(f"patches/{stack}/series is missing: restore it with git")
    rows = [row.partition("#")[0].strip() for row in file.read_text().splitlines()]
    names = [row for row in rows if row]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ToolError(f"patches/{stack}/series names {min(twice)} twice")
    return names


def read(checkout: Checkout) -> Contents:
    """The patches on disk.

    Raises:
        ToolError: a stack's list is missing, or a patch that it names.
    """
    contents: Contents = {}
    for stack in STACKS:
        files = [checkout.patches / stack / name for name in listed(checkout, stack)]
        for file in files:
            if not file.is_file():
                raise ToolError(f"patches/{stack}/series names {file.name}: no such file")
        contents[stack] = {file.name: file.read_bytes() for file in files}
    return contents


def find(contents: Contents, name: str) -> tuple[str, str]:
    """The stack and file name of a patch that a person names, as they please.

    Raises:
        ToolError: there is none of that name, or one in each of two stacks.
    """
    wanted = name.removeprefix("patches/").removesuffix(".patch")
    found = [
        (stack, file)
        for stack, files in contents.items()
        for file in files
        if wanted in (file.removesuffix(".patch"), f"{stack}/{file}".removesuffix(".patch"))
    ]
    if len(found) != 1:
        said = "no patch is" if not found else "two patches are"
        raise ToolError(f"{said} named {name}; `./build.sh series list` shows them all")
    return found[0]


def file_name(subject: str) -> str:
    """The name of a patch's file: its subject without tags, in plain letters.

    Raises:
        ToolError: the subject has no words.
    """
    words = re.sub(r"^(\s*\[[^\]]*\])+", "", subject).lower().replace("'", "")
    slug = re.sub(r"[^a-z0-9]+", "-", words).strip("-")
    if len(slug) > _NAME_LENGTH:
        slug = slug[: _NAME_LENGTH + 1].rpartition("-")[0] or slug[:_NAME_LENGTH]
    if not slug:
        raise ToolError(f"the subject {subject!r} has no words to name a file by")
    return f"{slug}.patch"


# ---------------------------------------------------------------- apply


def apply(
    repository: git.Git, stack: str, patches: dict[str, bytes], hint: str = _BY_HAND
) -> None:
    """Apply patches to a working tree, one commit each.

    Raises:
        ToolError: one does not apply; names the patch, the files and the lines.
    """
    folder = own_folder(repository) / "series"
    folder.mkdir(exist_ok=True)
    files = []
    for name, content in patches.items():
        if not content.startswith(b"From "):
            raise ToolError(f"patches/{stack}/{name} is not a patch of git's{_BY_HAND}")
        files.append(folder / name)
        files[-1].write_bytes(content)
    if not files:
        return
    try:
        repository.am(*_AM, *map(str, files))
    except git.GitCommandError as error:
        at = folder.parent / "rebase-apply" / "next"
        name = files[int(at.read_text()) - 1].name if at.exists() else "*"
        raise DoesNotApply(stack, name, str(error.stderr), hint) from None


def build(
    checkout: Checkout,
    release: str,
    contents: Contents,
    folder: Path,
    files: bool = False,
) -> git.Git:
    """Clone the base into ``folder`` and make the four branches; ``all`` is current.

    Args:
        files: write all files, not only those that the patches touch.

    Raises:
        ToolError: a patch does not apply.
    """
    repository = bases.check_out(checkout, release, folder, files)
    base = bases.in_clone(release)
    for stack in STACKS:
        # `git rebase` without further words takes what is tracked.
        repository.checkout("--quiet", "--track", "-b", stack, below(stack, base))
        apply(repository, stack, contents[stack])
    repository.checkout("--quiet", "--no-track", "-b", ALL, SCORING)
    apply(repository, DEPTH, contents[DEPTH], _ON_SCORING)
    return repository


def trees(repository: git.Git) -> dict[str, str]:
    """The tree hashes of the four branches."""
    return {name: repository.rev_parse(f"{name}^{{tree}}") for name in BRANCHES}


def applied(checkout: Checkout, lock: Lock, folder: Path, branch: str = ALL) -> git.Git:
    """Clone the base into ``folder``, apply the stacks of a branch, verify the result.

    Raises:
        ToolError: a patch does not apply, or the tree is not the locked one.
    """
    repository = bases.check_out(checkout, lock.release, folder)
    contents = read(checkout)
    for stack in layers(branch):
        apply(repository, stack, contents[stack])
    verify(checkout, lock, {branch: repository.rev_parse("HEAD^{tree}")})
    return repository


def verify(checkout: Checkout, lock: Lock, found: dict[str, str]) -> None:
    """Compare tree hashes with the locked ones.

    Raises:
        ToolError: one differs; all that do are named.
    """
    if bases.tree(checkout, lock.release) != lock.base_tree:
        return  # cloned with --source git: more files than the archive has
    wrong = [name for name in found if found[name] != lock.trees.get(name)]
    if wrong:
        rows = [
            f"  {name}: expected {lock.trees.get(name, 'none')}, actual {found[name]}"
            for name in wrong
        ]
        raise ToolError(
            "patches/ applied, but not to the trees that upstream.lock names\n"
            + "\n".join(rows)
            + "\nRun `./build.sh series open` and `export` to record them."
        )


# ---------------------------------------------------------------- format


def format_stack(repository: git.Git, stack: str, base: str, tip: str) -> dict[str, bytes]:
    """The commits after ``base`` as patches: contents by file name, in order.

    Raises:
        ToolError: there is a merge, or two patches get the same name.
    """
    span = f"{base}..{tip}"
    if repository.rev_list("--merges", "--max-count=1", span):
        raise ToolError(f"branch {stack} has a merge commit; a stack is flat")
    subjects = repository.log("--reverse", "--format=%s", span).splitlines()
    folder = own_folder(repository) / "series" / "formatted"
    for old in folder.glob("*"):
        old.unlink()
    repository.format_patch(*_FORMAT, "--output-directory", str(folder), span)
    patches: dict[str, bytes] = {}
    for subject, file in zip(subjects, sorted(folder.glob("*.patch")), strict=True):
        name = file_name(subject)
        if name in patches:
            raise ToolError(f"two patches of {stack} would be {name}: reword {subject!r}")
        patches[name] = file.read_bytes()
        if not patches[name]:
            raise ToolError(f"{subject!r} on branch {stack} changes nothing: drop it")
    return patches


def restacked(repository: git.Git, folder: Path) -> git.Git:
    """The branches with scoring and depth standing on fixes.

    Returns:
        ``repository`` itself if they do, else a clone in ``folder`` where they were
        moved. ``repository`` is never changed.

    Raises:
        ToolError: a patch conflicts; says how to move the stack by hand.
    """
    moved = {s: old for s in STACKS[1:] if (old := _stood_on(repository, s))}
    if not moved:
        return repository
    origin = str(repository.working_dir)
    options = ["--quiet", "--local", "--no-checkout", "--template="]
    repository.clone(*options, origin, str(folder))
    clone = hermetic_git(folder)
    for branch in STACKS:
        clone.update_ref(f"refs/heads/{branch}", repository.rev_parse(branch))
    for stack, old in moved.items():
        try:
            clone.checkout("--quiet", "--force", stack)
            clone.rebase("--quiet", "--empty=drop", "--onto", FIXES, old)
        except git.GitCommandError as error:
            patch, files = conflict(clone)
            raise ToolError(
                f"{stack} can not be put on the new fixes by itself: "
                + (f"{patch!r} conflicts in\n  " if files else "git says\n  ")
                + ("\n  ".join(files) or first_lines(error))
                + f"\nDo it by hand in {origin}:\n"
                f"  git rebase --onto {FIXES} {old[:12]} {stack}\n"
                "  # resolve, git add, git rebase --continue\nthen export again."
            ) from None
    return clone


def _stood_on(repository: git.Git, stack: str) -> str:
    """The commit of fixes that a stack was made on; empty if it is the present one."""
    common = repository.merge_base(FIXES, stack)
    if common == repository.rev_parse(FIXES):
        return ""
    try:
        return repository.merge_base("--fork-point", FIXES, stack)
    except git.GitCommandError:  # a clone knows nothing of earlier tips
        return common


def conflict(repository: git.Git) -> tuple[str, list[str]]:
    """The subject and the files at which a rebase stopped; empty if it did not."""
    files = repository.diff("--name-only", "--diff-filter=U").splitlines()
    if not files:
        return "", []
    return repository.log("-1", "--format=%s", "REBASE_HEAD"), files


def in_progress(folder: Path) -> bool:
    """Whether a rebase or am waits in a working tree."""
    git_folder = own_folder(hermetic_git(folder))
    return any((git_folder / n).exists() for n in ("rebase-merge", "rebase-apply"))
