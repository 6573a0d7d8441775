"""Downloads: WikiText's archives through TensorFlow Datasets, tokenizers through the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

import huggingface_hub.constants
import requests
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from loglinear_jax.command_line import needs_extra
from loglinear_jax.text.files import CorpusError

ANSWER_SECONDS = 3
WIKITEXT_SITE = "https://wikitext.smerity.com"  # the author's own; the first address, on S3, is gone
WIKITEXT_ARCHIVES = {  # bytes and SHA-256 of the archives as published on S3; a download that differs is refused
    "wikitext-103-raw": (191984949, "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794"),
    "wikitext-103": (190229076, "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590"),
    "wikitext-2-raw": (4721645, "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11"),
    "wikitext-2": (4475746, "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c"),
}


def wikitext_archive(name: str, folder: Path) -> Path:
    """WikiText's zip file, downloaded into the folder unless it is there. Raises CorpusError if it can't be had."""
    with needs_extra("text"):
        import tensorflow_datasets as tfds  # takes seconds
        from tensorflow_datasets.core.download.checksums import UrlInfo
        from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError
        from tensorflow_datasets.core.utils import Size

    url = f"{WIKITEXT_SITE}/{name}-v1.zip"
    size, sha256 = WIKITEXT_ARCHIVES[name]
    manager = tfds.download.DownloadManager(
        download_dir=folder,
        url_infos={url: UrlInfo(size=Size(size), checksum=sha256, filename=f"{name}-v1.zip")},
        force_checksums_validation=True,
    )
    if not sys.stderr.isatty():
        tfds.disable_progress_bar()  # in a log file it would write a line each time it is redrawn
    try:
        if not list(folder.glob(f"*{name}-v1*.zip")):
            _check_answers(url)
        return Path(manager.download(url))
    except NonMatchingChecksumError as error:
        raise CorpusError(
            f"corpus: what {url} sends has another checksum than the published SHA-256 {sha256}: try again, or unpack "
            f"{name}-v1.zip from elsewhere, and give the folder as task.corpus"
        ) from error
    except (requests.RequestException, tfds.download.DownloadError) as error:
        raise CorpusError(
            f"corpus: {name} can't be downloaded from {WIKITEXT_SITE} ({error}). Without a network, fetch {name}-v1.zip "
            "elsewhere, unpack it, and give the folder as task.corpus"
        ) from error


def hub_tokenizer(name: str) -> Path:
    """The file tokenizer.json of a repository on the hub, downloaded unless it is there. Raises CorpusError if it can't be
    had."""
    try:
        cached = huggingface_hub.try_to_load_from_cache(name, "tokenizer.json")
        if isinstance(cached, str):
            return Path(cached)
        if not huggingface_hub.constants.HF_HUB_OFFLINE:
            _check_answers(huggingface_hub.hf_hub_url(name, "tokenizer.json"))
        return Path(huggingface_hub.hf_hub_download(name, "tokenizer.json"))
    except (HfHubHTTPError, HFValidationError, OSError) as error:  # requests' errors are OSErrors
        reason = str(error).strip().split("\n")[0]
        raise CorpusError(
            f"tokenizer: {name!r} is not a local folder, and can't be had from the hub ({reason}). Without a network, give a "
            "folder that holds tokenizer.json, or vocab.json and merges.txt"
        ) from error


def _check_answers(url: str) -> None:
    """Raises requests.RequestException if no server answers there; the libraries that download would try for minutes."""
    try:
        requests.head(url, timeout=ANSWER_SECONDS).close()
    except requests.exceptions.SSLError:
        pass  # a server is there, and the download will say what is wrong with it
    except requests.RequestException as error:
        raise requests.RequestException(f"no answer from {url}") from error
