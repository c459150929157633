"""`r1 merge --push`: upload a merged folder to the Hugging Face hub, or to the server that HF_ENDPOINT names."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from r1_cli.jobs.model_card import CARD, is_unedited

if TYPE_CHECKING:
    from huggingface_hub import HfApi


class HubError(RuntimeError):
    """The hub did not take the folder; the message says why and what to do."""


def push_folder(folder: Path, repo: str, *, public: bool) -> tuple[str, list[str]]:
    """Upload a folder as one commit; return its address, and notes.

    The token is that of HF_TOKEN or of `hf auth login`. A repository that exists stays private or public. Its card
    stays too, unless `r1 merge` wrote it.

    Raises:
        HubError: no token, no permission, no such name, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi, constants, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if get_token() is None:
        raise HubError(f"--push {repo}: there is no token; set HF_TOKEN, or run `hf auth login`")
    api, notes, ignored = HfApi(), list[str](), list[str]()
    try:
        address = api.create_repo(repo, private=not public, exist_ok=True)
        if api.file_exists(repo, CARD) and not is_unedited(_read_card(api, repo)):
            ignored = [CARD]
            notes.append(f"{repo} has a {CARD} of its own, which stays as it is")
        if bool(api.repo_info(repo).private) is public:
            notes.append(f"{repo} exists and stays {'private' if public else 'public'}")
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Upload by r1 merge", ignore_patterns=ignored
        )
    except HFValidationError as error:
        raise HubError(f"--push {repo}: {error}") from error
    except HfHubHTTPError as error:
        reason = error.server_message or str(error).strip().splitlines()[0]
        raise HubError(
            f"--push {repo}: {constants.ENDPOINT} refused it ({reason}); may the token write there?"
        ) from error
    except Exception as error:  # of the HTTP client's own kinds, by version
        raise HubError(f"--push {repo}: {constants.ENDPOINT} cannot be reached ({error})") from error
    return str(address), notes


def _read_card(api: "HfApi", repo: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return Path(api.hf_hub_download(repo, CARD, local_dir=folder)).read_text(encoding="utf-8", errors="replace")
