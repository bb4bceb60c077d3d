# SPDX-License-Identifier: Apache-2.0
"""Git that gives the same bytes for everybody.

No user or system configuration, attribute, hook or template is read, and every
setting that changes a diff, a patch file, a commit or a checkout is pinned.
"""

import os
from pathlib import Path

import git

ID_NAME = "vllm-utio series"
ID_EMAIL = "series@vllm-utio.invalid"
# Author and committer date of the commits that hold an upstream release.
BASE_DATE = "2000-01-01T00:00:00+0000"

_ENVIRONMENT = {
    # A file, as what clones and fetches on the other side reads no `-c`.
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
    "GIT_SEQUENCE_EDITOR": "true",
    "GIT_PAGER": "cat",
    "GIT_COMMITTER_NAME": ID_NAME,
    "GIT_COMMITTER_EMAIL": ID_EMAIL,
    "LC_ALL": "C",
    "TZ": "UTC",
}
# How a network is reached is the user's business; nothing else of theirs is kept.
_KEPT_PREFIXES = ("GIT_SSL_", "GIT_SSH", "GIT_PROXY", "GIT_HTTP", "GIT_ASKPASS")

# Settings of a checkout, also written into the repository that people edit.
CHECKOUT_CONFIG = {
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",
    "core.eol": "lf",
    "core.fileMode": "true",
    "core.hooksPath": os.devnull,
    "core.safecrlf": "false",
    "core.symlinks": "true",
    "gc.auto": "0",
    "maintenance.auto": "false",
}
_CONFIG = {
    **CHECKOUT_CONFIG,
    "am.keepcr": "true",
    "am.threeWay": "false",
    "apply.ignoreWhitespace": "no",
    "apply.whitespace": "nowarn",
    "commit.gpgSign": "false",
    "core.excludesFile": os.devnull,
    "core.fsmonitor": "false",
    "core.quotePath": "true",
    "diff.algorithm": "histogram",
    "diff.colorMoved": "no",
    "diff.context": "3",
    "diff.indentHeuristic": "true",
    "diff.interHunkContext": "0",
    "diff.mnemonicPrefix": "false",
    "diff.noprefix": "false",
    "diff.renames": "false",
    "diff.submodule": "short",
    "diff.suppressBlankEmpty": "false",
    "format.useAutoBase": "false",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "init.defaultObjectFormat": "sha1",
    "init.templateDir": "",
    "mailinfo.scissors": "false",
    "merge.conflictStyle": "diff3",  # shows a person the old release's lines too
    "merge.renames": "true",
    "rebase.autoSquash": "false",
    "rebase.autoStash": "false",
    "rebase.updateRefs": "false",
    "rerere.enabled": "false",
    "tag.gpgSign": "false",
}


def hermetic_environment() -> dict[str, str]:
    """Variables that shield git, and the locale and time zone, from the user's."""
    return dict(_ENVIRONMENT)


class _Git(git.Git):
    """Runs git without the user's ``GIT_*`` variables.

    GitPython hands this process's variables on and can only add to them, so
    ``env`` drops those that could redirect git or change what it writes.
    """

    def execute(self, command, **options):  # type: ignore[no-untyped-def, override]
        dropped = [
            f"--unset={name}"
            for name in os.environ
            if name.startswith("GIT_")
            and not name.startswith(_KEPT_PREFIXES)
            and name not in self.environment()
        ]
        prefix = ["env", *dropped] if dropped else []
        return super().execute([*prefix, *command], **options)


def hermetic_git(folder: Path) -> git.Git:
    """Git commands to be run in ``folder``, shielded from the user's set-up."""
    repository = _Git(str(folder))
    repository.update_environment(**_ENVIRONMENT)
    repository.set_persistent_git_options(
        c=[f"{key}={value}" for key, value in _CONFIG.items()]
    )
    return repository


def first_lines(error: git.GitCommandError, count: int = 12) -> str:
    """What git said, without GitPython's framing."""
    text = f"{error.stderr or ''}\n{error.stdout or ''}"
    for frame in ("stderr: '", "stdout: '"):
        text = text.replace(frame, "")
    lines = [line.rstrip("'").strip() for line in text.splitlines()]
    return "\n  ".join([line for line in lines if line][:count])
