"""The Hugging Face hub: download journals, upload folders."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from .errors import ZeroBlockError, shown

JOURNAL = "journal.zbj"
"""The name of an exported journal in a repository."""
HUB_ID = re.compile(r"[\w][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)
"""A repository: user/name."""


def find(place: str | Path) -> Path:
    """Find a journal: a path on this machine, or a repository ``user/name``, whose journal is downloaded.

    A path that exists is never looked up on the hub.

    Args:
        place: a file, a run's folder, or a hub id.
    """
    path = Path(place).expanduser()
    if path.exists() or not is_id(str(place)):
        return path
    try:
        return Path(_api().hf_hub_download(str(place), JOURNAL))
    except Exception as error:  # no network, no repository, no such file: each in its own kind of exception
        kind = type(error).__name__
        if kind in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
            raise ZeroBlockError(
                f"{place} on the hub holds no {JOURNAL}: if it is a model folder, load it with "
                f"from_pretrained({str(place)!r})"
            ) from error
        raise ZeroBlockError(
            f"there is no file or folder {str(place)!r} here, and it could not be downloaded from the hub "
            f"({_reason(error)}): check the name and the network; a private repository needs a token "
            "(hf auth login, or HF_TOKEN)"
        ) from error


def is_id(name: str) -> bool:
    """Whether a name can be a repository of the hub.

    >>> is_id("ann/tuned"), is_id("tuned.zbj"), is_id("runs/tuned.zbj"), is_id("./tuned")
    (True, False, False, False)
    """
    return HUB_ID.fullmatch(name) is not None and not name.endswith((".zbj", "."))


def check_access(repo: str, endpoint: str | None = None) -> str:
    """Refuse a repository that cannot be written to, before any work is done; return the user's name.

    Args:
        repo: ``user/name``.
        endpoint: address of the hub; by default HF_ENDPOINT, or the public one.
    """
    from huggingface_hub import get_token

    if not is_id(repo):
        raise ZeroBlockError(f"{shown(repo)!r} is not a repository: give user/name, with your name on the hub")
    if get_token() is None:
        raise ZeroBlockError(
            "no token for the hub: make one with write access at https://huggingface.co/settings/tokens, then run "
            "hf auth login, or set HF_TOKEN"
        )
    try:
        found: dict[str, Any] = _api(endpoint).whoami()
    except Exception as error:
        raise _refused(repo, error) from error
    return str(found.get("name", ""))


def upload(folder: Path, repo: str, *, private: bool, message: str, endpoint: str | None = None) -> str:
    """Send a folder to a repository, which is created if needed; return its address.

    Args:
        folder: the folder whose files are sent; they replace files of the same names.
        repo: ``user/name``.
        private: whether a new repository is private; an existing one stays as it is.
        message: the commit message.
        endpoint: address of the hub; by default HF_ENDPOINT, or the public one.
    """
    from .quiet import bars

    api = _api(endpoint)
    try:
        with bars():
            url = api.create_repo(repo, private=private, exist_ok=True)
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:
        raise _refused(repo, error) from error
    return str(url)


def _refused(repo: str, error: Exception) -> ZeroBlockError:
    """The error for a hub that could not be reached or refused, with the fix."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        user = repo.partition("/")[0]
        return ZeroBlockError(
            f"the hub refuses to let this token write to {repo} (status {status}): use a token with write access for "
            f"{user} (https://huggingface.co/settings/tokens, then hf auth login, or HF_TOKEN)"
        )
    if status is not None:
        return ZeroBlockError(f"the hub answered {status} for {repo}: {_reason(error)}")
    return ZeroBlockError(
        f"the hub could not be reached ({_reason(error)}): check the network, HF_ENDPOINT and HF_HUB_OFFLINE; "
        "--dry-run FOLDER writes what would be sent"
    )


def _reason(error: Exception) -> str:
    return shown((str(error).strip() or type(error).__name__).splitlines()[0])


def _api(endpoint: str | None = None) -> Any:
    """The client of the hub, at the address in the environment now; huggingface_hub reads its default on import."""
    from huggingface_hub import HfApi

    from . import __version__

    address = endpoint or os.environ.get("HF_ENDPOINT") or None
    return HfApi(endpoint=address, library_name="zeroblock", library_version=__version__)
